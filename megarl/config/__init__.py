"""Recipes: typed models of every key, loading, checks before a run, and the reference of keys."""
