"""Files that run in the servers' interpreter. megarl imports nothing from here."""
