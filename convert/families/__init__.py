"""Attention families of published models, as data (one JSON file each), and how their files map to canonical tensors."""
