"""What a run needs and how fast it can be, from formulas: parameters, FLOPs. No torch.

Each formula is derived in docs/planning.md.
"""
