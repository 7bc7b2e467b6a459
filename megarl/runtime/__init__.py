"""What runs inside a worker: the program of a rank, its health, and the stages of the recipes."""
