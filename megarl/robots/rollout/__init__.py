"""Episodes of robots: a policy that acts by chunks, in simulators."""
