"""A model on a mesh of ranks, its gradients, its optimizer, and one training step."""
