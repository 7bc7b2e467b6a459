"""Models and runs on disk, read without torch: sizes of a model, its weight files, what a run folder holds."""
