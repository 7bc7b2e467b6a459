"""Commands of `megarl`: arguments, text and exit codes around the work of other packages."""
