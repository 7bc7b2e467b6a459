"""Generation in the training process, on the training parameters."""
