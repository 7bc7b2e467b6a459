"""Multi-head latent attention: keys and values of all heads are expanded from one small vector per token."""
