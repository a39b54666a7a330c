"""Drift of a converted model from its source, layer by layer and in its predictions."""
