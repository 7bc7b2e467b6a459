"""Weight updates from shard to shard: every trainer rank sends boxes (rectangular parts of tensors) directly to the
server ranks that store them.

Nothing here depends on an engine. `boxes` describes how ranks store a model, `plan` decides who sends what and when,
`program` is the result's format, and `transfer` and `exchange` send the weights.
"""
