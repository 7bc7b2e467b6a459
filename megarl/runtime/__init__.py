"""The inside of a worker process: the program of a rank, its heartbeats, and the stages of the task graphs."""
