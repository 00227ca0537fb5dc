"""Lather: train mixture-of-experts language models with second-order optimizers in the memory you
have.

`lather.optim` holds the optimizers and needs torch alone; the rest is the trainer behind the
`lather` command.
"""

__version__ = "0.2.0"
