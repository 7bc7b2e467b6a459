"""Vision-language models: a vision encoder in front of a decoder."""
