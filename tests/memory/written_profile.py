"""Reads a profile from the JSON that `lather profile --json` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lather.memory.profile import SavedStorage, SavedTensors


def from_json(document: Mapping[str, Any]) -> SavedTensors:
    """Return the profile that `profile_report.to_json` was given."""
    storages = (
        SavedStorage(
            **{**one, "shape": tuple(one["shape"]), "also_saved_in": tuple(one["also_saved_in"])}
        )
        for one in document["storages"]
    )
    return SavedTensors(tuple(storages), document["num_tokens"])
