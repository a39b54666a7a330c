"""Runs calibration text through the source model and its converted model, layer by layer."""
