"""Calibration and evaluation text: documents, windows, tokenizers."""
