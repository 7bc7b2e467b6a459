"""Patches and version checks for third-party packages. No other module changes third-party code."""
