"""Recipes: task graphs composed from stages, and the YAML files that use them."""
