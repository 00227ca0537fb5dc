"""One file per command of `lather`: its arguments and what it does with them."""

COMMANDS = {
    "train": "train",
    "data": "data",
    "generate": "generate",
    "eval": "eval",
    "import": "exchange",
    "export": "exchange",
    "plot": "plot",
    "plan": "plan",
    "profile": "profile",
    "bench": "bench",
    "completion": "completion",
}
"""The module of `lather.commands` that has each one; it is imported when it is called, so that help and errors come at once."""
