"""Softmax attention with grouped queries."""
