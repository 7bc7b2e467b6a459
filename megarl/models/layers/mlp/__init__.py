"""The dense MLP and its activation."""
