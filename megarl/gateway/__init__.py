"""A chat endpoint in front of generation: a program that speaks to it plays an episode."""
