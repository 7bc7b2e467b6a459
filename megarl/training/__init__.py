"""The Megatron engine: layouts, forward and backward, optimizer, offload, checkpoints."""
