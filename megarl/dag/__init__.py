"""Task graphs: declared (`pipeline`), checked (`graph`), drawn, placed on devices, and walked by every worker."""
