"""The stock classes with latent attention as targets."""
