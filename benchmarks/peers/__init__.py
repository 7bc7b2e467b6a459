"""The same cases on other programs, in their own environments."""
