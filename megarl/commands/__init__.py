"""Commands of `megarl`: arguments, printed text and exit codes. Other packages do the work."""
