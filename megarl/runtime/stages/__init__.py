"""The work of the task graphs' nodes. One file per role; nothing heavy is imported until a stage runs."""
