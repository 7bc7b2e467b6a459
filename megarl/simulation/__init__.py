"""A simulation of a run on other devices, without them: discrete events over the same graph and teams."""
