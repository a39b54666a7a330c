"""Pure functions on the tensors of one attention layer, without paths, configs or model objects."""
