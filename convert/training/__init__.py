"""Training that conversion and uptraining share: losses, sizes of steps, the fit loop, refinement, polishing."""
