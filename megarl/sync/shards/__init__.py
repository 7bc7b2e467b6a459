"""Weight updates from shard to shard: every trainer rank sends boxes of tensors to the server ranks that store them.

Nothing here knows an engine. `boxes` describes how ranks store a model, `program` what is sent when. Only `hashes` uses
torch.
"""
