"""Names of a model's tensors in a file: a stack of routed experts is a single parameter of the
model, and an entry per expert in the file.

So a file does not depend on which rank had which experts.
"""

from __future__ import annotations

from collections.abc import Mapping


def is_stack(name: str) -> bool:
    """Tell whether the parameter is a stack of routed experts, an expert at each index of dim 0."""
    return ".experts." in f".{name}"


def entry_name(parameter: str, *index: int) -> str:
    """Return the name of an entry: of an expert of a stack, or of a whole parameter."""
    return ".".join((parameter, *map(str, index)))


def split_entry(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the parameter, and the entry's index in it: the number of the expert, or nothing for
    an entry that is a whole parameter."""
    stack, _, number = name.rpartition(".")
    return (stack, (int(number),)) if is_stack(name) and number.isdecimal() else (name, ())


def entry_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the entries of parameters with these names and shapes."""
    entries: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if is_stack(name):
            entries |= {entry_name(name, expert): shape[1:] for expert in range(shape[0])}
        else:
            entries[name] = shape
    return entries
