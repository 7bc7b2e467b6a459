"""The gated delta net of Qwen3-Next and Qwen3.5."""
