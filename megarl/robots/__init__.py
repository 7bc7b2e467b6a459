"""Robots: policies that act, in simulators: all that the core's task `robot` needs."""
