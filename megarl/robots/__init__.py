"""Policies that act in simulators: everything that a recipe with the section `robot` needs."""
