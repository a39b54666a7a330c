"""Decoding over a latent cache: in torch on every device, and by a Triton kernel on CUDA."""
