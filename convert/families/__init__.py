"""Model families as data (one JSON file each), and conversion between their stored tensors and
canonical weights.
"""
