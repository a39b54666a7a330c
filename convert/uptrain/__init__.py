"""Training a converted checkpoint further."""
