"""Mixtures of experts: router, experts, and the dispatch of tokens to them."""
