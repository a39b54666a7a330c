"""Run a stock model layer by layer with the tensors of a checkpoint."""
