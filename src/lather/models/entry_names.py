"""Names under which a model's tensors are stored: routed experts, stacked in a parameter, have one entry each.

A file then knows nothing of which rank had which experts.
"""

from __future__ import annotations


def is_stack(name: str) -> bool:
    """Whether dim 0 of this parameter is over routed experts."""
    return ".experts." in f".{name}"


def entry_name(stack: str, expert: int) -> str:
    """The stored name of one expert of a stack."""
    return f"{stack}.{expert}"


def split_entry(name: str) -> tuple[str, int | None]:
    """Parameter and number of the expert; None for an entry that is a whole parameter."""
    stack, _, number = name.rpartition(".")
    return (stack, int(number)) if is_stack(name) and number.isdecimal() else (name, None)
