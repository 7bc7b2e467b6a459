"""The certificate of a machine: `megarl doctor gpu` tests what works on it, and how fast."""
