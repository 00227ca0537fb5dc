"""One file per command of `lather`: its arguments and what it does with them."""
