"""Folds the key/value heads of each group onto one shared head."""
