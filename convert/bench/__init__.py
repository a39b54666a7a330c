"""Decode throughput, cache and memory of checkpoints, side by side."""
