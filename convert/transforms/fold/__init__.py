"""Folding query-head groups onto shared key/value heads."""
