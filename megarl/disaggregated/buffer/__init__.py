"""What one team makes and another one needs, when roles have devices of their own: who has it, and who gets it."""
