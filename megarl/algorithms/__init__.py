"""The mathematics: pure functions from tensors to tensors. Nothing here knows Ray, Megatron or recipe files.

Everything takes B sequences of response tokens in one of two forms, and answers in the same form:

* packed, what the system uses: values [N], bool mask [N], int64 `offsets` [B + 1]; sequence i is
  `offsets[i]:offsets[i + 1]`;
* padded: values [B, T], bool mask [B, T], no offsets.

What a mask hides is never read: NaN there changes nothing. A sequence that is masked entirely takes no part in any
statistic. Statistics that span ranks take `all_sum`, a function that adds a small float64 tensor over ranks.
"""
