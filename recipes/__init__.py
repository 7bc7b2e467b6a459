"""Recipes: task graphs composed of stages, and the YAML files that use them."""
