"""Further training of a converted checkpoint."""
