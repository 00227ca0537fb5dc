"""One module per command of `lather`: its arguments, and what it does."""

COMMANDS = {
    "train": "train",
    "data": "data",
    "generate": "generate",
    "eval": "eval",
    "import": "exchange",
    "export": "exchange",
    "plot": "plot",
    "report": "report",
    "doctor": "doctor",
    "plan": "plan",
    "profile": "profile",
    "bench": "bench",
    "completion": "completion",
}
"""Module in `lather.commands` of each command; it is imported only when the command is called, so that help and errors appear at once."""
