"""Several teams in one run: the rollout in a team of its own, what goes between teams, and who waits for whom."""
