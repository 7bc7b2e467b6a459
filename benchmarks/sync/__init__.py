"""`megarl bench sync`: weights to a receiver process by every transport."""
