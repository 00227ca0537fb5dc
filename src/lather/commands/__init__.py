"""One module per command of `lather`: its arguments, and what it does. A command returns its exit
status, or nothing if that is 0."""

NAMES = (
    "train",
    "sweep",
    "data",
    "generate",
    "eval",
    "score",
    "import",
    "export",
    "plot",
    "report",
    "doctor",
    "plan",
    "profile",
    "bench",
    "completion",
)
COMMANDS = {name: "exchange" if name in ("import", "export") else name for name in NAMES}
"""Module in `lather.commands` of each command; it is imported only when the command is called, so
that help and errors appear at once."""
