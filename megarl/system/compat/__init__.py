"""Patches and version gates for third-party packages; no other module changes what it did not write."""
