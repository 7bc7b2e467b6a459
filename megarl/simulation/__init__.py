"""What a run would do with its time on other devices, without them: discrete events over the same graph and teams."""
