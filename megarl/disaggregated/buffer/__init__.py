"""The buffer between teams, through which they exchange samples and messages."""
