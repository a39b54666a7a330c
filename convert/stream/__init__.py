"""A stock model run layer by layer from the tensors of a checkpoint."""
