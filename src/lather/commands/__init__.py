"""One module per command of `lather`: its arguments, and what it does."""
