"""Memory between forward and backward: tensors that are recomputed, weight gradients that are
deferred, weights that are rounded once."""
