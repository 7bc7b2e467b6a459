"""Task graphs: declared (`pipeline`), checked (`graph`), drawn (`draw`), placed on devices, and run by every worker."""
