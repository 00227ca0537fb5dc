"""Reads checkpoints from disk by hand: with the safetensors library and by the description of
`state.json` in docs/checkpoints.md."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def stored_tensors(path: Path, *, random: bool = False) -> dict[str, Tensor]:
    """Put every tensor of a checkpoint together; each element must be in exactly one piece.
    `random` includes each rank's own random states."""
    state = json.loads((path / "state.json").read_text())
    files = {name: load_file(path / name) for name in state["files"]}
    found = {}
    for name, entry in state["tensors"].items():
        if name.startswith("random/") and not random:
            continue
        whole: Tensor | None = None
        times = torch.zeros(entry["shape"], dtype=torch.int64)
        for file, offsets, sizes in entry["pieces"]:
            inside = tuple(
                slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)
            )
            parts = [
                ":" if size == all_of else f"{start}:{start + size}"
                for start, size, all_of in zip(offsets, sizes, entry["shape"], strict=True)
            ]
            piece = files[file][name if sizes == entry["shape"] else f"{name}[{', '.join(parts)}]"]
            if whole is None:
                whole = torch.zeros(entry["shape"], dtype=piece.dtype)
            whole[inside] = piece
            times[inside] += 1
        assert whole is not None, name
        assert bool((times == 1).all()), name
        found[name] = whole
    return found


def same_bits(path: Path, expected: Path) -> bool:
    """Whether weights, buffers and optimizer state are equal to the bit."""
    found, wanted = stored_tensors(path), stored_tensors(expected)
    assert found.keys() == wanted.keys()
    return all(
        found[name].dtype == x.dtype and found[name].shape == x.shape and found[name].equal(x)
        for name, x in wanted.items()
    )


def bytes_by_file(path: Path) -> dict[str, int]:
    """The bytes of the tensors' pieces in each file."""
    return {
        file.name: sum(x.nbytes for x in load_file(file).values())
        for file in sorted(path.glob("rank-*.safetensors"))
    }
