"""The mathematics: pure functions from tensors to tensors, which import neither Ray nor Megatron nor recipe files.

All functions take B sequences of response tokens in one of two forms, and return the same form:

* packed, used by the system: values [N], bool mask [N], int64 `offsets` [B + 1]; sequence i is
  `offsets[i]:offsets[i + 1]`;
* padded: values [B, T], bool mask [B, T], no offsets.

Masked values are never read: NaN there changes nothing. A fully masked sequence is excluded from all statistics.
Statistics that span ranks take `all_sum`, a function that adds a small float64 tensor over ranks.
"""
