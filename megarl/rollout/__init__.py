"""Generation: the engine protocol, sample seeds, and the engines."""
