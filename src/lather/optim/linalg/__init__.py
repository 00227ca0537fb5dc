"""Pure functions on batches of matrices (B, m, n), in the letters of the papers."""
