"""Targets with latent attention (MLA) in stock classes."""
