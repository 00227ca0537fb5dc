"""Memory between forward and backward: what is computed again, put off, or rounded once."""
