"""Ways to bring a bucket to a receiver."""
