"""The kinds of layers, one folder each: sizes and rules without torch (`plain`), training, and decoding."""
