"""Flow-matching policies: an action expert (pi0's form) that denoises chunks of actions."""
