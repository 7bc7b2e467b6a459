"""The certificate of a machine: `megarl doctor gpu` finds out what works on it, and how fast."""
