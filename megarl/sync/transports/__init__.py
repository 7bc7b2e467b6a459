"""Ways for a bucket to reach a receiver."""
