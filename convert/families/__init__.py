"""Attention families of published models, as data (one JSON file each), and their files' canonical form."""
