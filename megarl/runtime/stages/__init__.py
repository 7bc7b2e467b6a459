"""What the nodes of the task graphs do. One file per role; nothing heavy is imported until a stage runs."""
