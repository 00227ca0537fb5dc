"""Turns rows of Arrow (Parquet, and Hugging Face's `datasets`) into the records of JSON.

All structs of a column have the same fields in Arrow. A field that a row did not have is null in
its struct, and a null that the row had looks the same, so nulls in structs are left out. Columns,
items of lists and values of maps stay as they are, null or not.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
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
        return partial(_struct, changes={field.name: _change_of(field.type) for field in fields})
    if types.is_map(arrow_type):
        return partial(_map, change_item=_change_of(arrow_type.item_type))
    if types.is_dictionary(arrow_type):
        return _change_of(arrow_type.value_type)
    if any(getattr(types, f"is_{kind}", lambda _: False)(arrow_type) for kind in LISTS):
        change_item = _change_of(arrow_type.value_type)
        return change_item and partial(_list, change_item=change_item)
    if getattr(arrow_type, "extension_name", "") == "arrow.json":
        return lambda value: value if value is None else json.loads(value)
    storage = getattr(arrow_type, "storage_type", None)  # of other extension types
    return None if storage is None else _change_of(storage)


def _struct(value: dict[str, Any] | None, changes: dict[str, Change | None]) -> Any:
    if value is None:
        return None
    present = {name: item for name, item in value.items() if item is not None}
    return {
        name: change(item) if (change := changes[name]) else item for name, item in present.items()
    }


def _map(value: list[tuple[Any, Any]] | None, change_item: Change | None) -> Any:
    """Keys that are not text become text, as in JSON."""
    if value is None:
        return None
    return {str(key): change_item(item) if change_item else item for key, item in value}


def _list(value: list[Any] | None, change_item: Change) -> Any:
    return value if value is None else [change_item(item) for item in value]
