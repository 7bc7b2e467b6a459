"""Sections of the certificate, one file each, with a function `run(found, folder)` for a process of its own."""
