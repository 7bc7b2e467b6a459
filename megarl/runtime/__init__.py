"""The inside of a worker: the program of a rank, its health, and the stages of the recipes."""
