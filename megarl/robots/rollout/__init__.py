"""Plays episodes: a policy chooses chunks of actions, which simulators execute."""
