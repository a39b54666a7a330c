"""Quantized weights read as dense ones: a tensor at a time, by the library that owns the format."""
