"""Training code shared by conversion and uptraining: losses, step sizes, the fit loop, refinement
and polishing.
"""
