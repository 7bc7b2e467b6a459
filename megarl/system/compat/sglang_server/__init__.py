"""Files that run in the servers' own interpreter; nothing here is imported by megarl."""
