"""Turns rows of Arrow (Parquet, and Hugging Face's `datasets`) into the records of JSON.

All structs of a column have the same fields in Arrow. A field that a row did not have is null in
its struct, and a null that the row had looks the same, so nulls in structs are left out. Columns,
items of lists and values of maps stay as they are, null or not.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

Change = Callable[[Any], Any]
"""Turns a value that `to_pylist` gives into that of a record."""
LISTS = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
"""Types of lists; older versions of pyarrow have fewer."""


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a `pyarrow.Table` or `pyarrow.RecordBatch` as records.

    Raises pyarrow's errors, and ValueError for a value of type JSON that is no JSON.
    """
    changes = {field.name: change for field in table.schema if (change := _change_of(field.type))}
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        for name, change in changes.items():
            row[name] = change(row[name])
    return rows


def _change_of(arrow_type: Any) -> Change | None:
    """Return the function for the values of a type; None if they stay as they are."""
    types = importlib.import_module("pyarrow.types")
    if types.is_struct(arrow_type):
        fields = [arrow_type.field(number) for number in range(arrow_type.num_fields)]
        return _of_struct({field.name: _change_of(field.type) for field in fields})
    if types.is_map(arrow_type):
        return _of_map(_change_of(arrow_type.item_type))
    if types.is_dictionary(arrow_type):
        return _change_of(arrow_type.value_type)
    if any(getattr(types, f"is_{kind}", lambda _: False)(arrow_type) for kind in LISTS):
        item = _change_of(arrow_type.value_type)
        return item and _of_list(item)
    if getattr(arrow_type, "extension_name", "") == "arrow.json":
        return lambda value: value if value is None else json.loads(value)
    storage = getattr(arrow_type, "storage_type", None)  # of other extension types
    return None if storage is None else _change_of(storage)


def _of_struct(changes: dict[str, Change | None]) -> Change:
    def change(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        kept = ((name, one, changes[name]) for name, one in value.items() if one is not None)
        return {name: one if change is None else change(one) for name, one, change in kept}

    return change


def _of_map(change_item: Change | None) -> Change:
    """Keys that are not text become text, as in JSON."""

    def change(value: list[tuple[Any, Any]] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {str(key): item if change_item is None else change_item(item) for key, item in value}

    return change


def _of_list(change_item: Change) -> Change:
    return lambda value: value if value is None else [change_item(item) for item in value]
