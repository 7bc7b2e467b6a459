"""Recipes: typed models of every key, loading, and the reference of keys."""
