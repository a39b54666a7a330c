"""Targets: the checkpoint layouts that a conversion can write."""
