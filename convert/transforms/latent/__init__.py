"""Converts attention to multi-head latent attention by factoring keys and values."""
