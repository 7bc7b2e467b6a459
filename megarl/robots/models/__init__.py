"""Models of robots: policies, and encoders of episodes."""
