"""The training loop of a run with one team or several, and what teams exchange: samples, messages, weights."""
