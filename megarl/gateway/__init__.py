"""A chat endpoint in front of generation: programs that speak to it are episodes, whose tokens are recorded as sampled."""
