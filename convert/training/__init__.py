"""Training that conversion and uptraining share: losses, learning rates, the constant channel, polishing."""
