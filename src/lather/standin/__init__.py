"""A device that torch and Lather take for a GPU, without memory or arithmetic, on which the real code can be run anywhere."""
