"""What a model keeps in memory: saved tensors counted, peaks measured."""
