"""Sections of the certificate, one file each: `run(found, folder)` in a process of its own."""
