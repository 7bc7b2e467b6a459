"""Samples and where they come from: batches, packing, prompts, loaders."""
