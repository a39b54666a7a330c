"""Factoring attention into multi-head latent attention."""
