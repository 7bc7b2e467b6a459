"""Pictures and demonstrations of robots."""
