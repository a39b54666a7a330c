"""Pure functions on one attention layer: tensors in, tensors out. No paths, no configs, no models."""
