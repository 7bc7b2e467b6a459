"""Throughput on fixed cases, side by side with other programs, and of single parts."""
