"""Calibration tokens walking through the source and its converted twin, layer by layer."""
