"""Several teams in one run: a rollout team of its own, the messages and samples between teams, and who waits
for whom.
"""
