"""Files of robot policies, read without torch."""
