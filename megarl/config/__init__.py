"""Recipes: typed models of every key, the loader, and the reference of all keys."""
