"""Models and runs on disk, read without torch: model sizes, weight files, the files of a run folder."""
