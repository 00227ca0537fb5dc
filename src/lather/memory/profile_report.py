"""Reports profiles (`lather.memory.profile`): tables, JSON, and bars of bytes per token.

Layers that keep the same are shown once. Sizes per token are of activations only: rounded weights
do not grow with the tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from lather.console import titled_table
from lather.files import whole_file
from lather.memory.plan_report import first_to_last, unit_of
from lather.memory.profile import SEGMENTS, KeptTensor, Profile

COLORS = dict(
    zip(SEGMENTS, ("#4477aa", "#66ccee", "#ee6677", "#ccbb44", "#aa3377", "#228833"), strict=True)
)
"""A color for each segment, distinguishable with any color vision."""
BASELINE = "reference"
"""Memory mode with which the others are compared."""
MIB, KIB = 2**20, 2**10


def to_json(profile: Profile) -> dict[str, Any]:
    """Return plain values: totals, and every tensor."""
    return {
        "num_tokens": profile.num_tokens,
        "activation_bytes_per_token": profile.bytes() / profile.num_tokens,
        "activation_bytes": profile.by_segment(),
        "rounded_weight_bytes": profile.bytes(weights=True),
        "layers": {layer: profile.by_segment(layer) for layer in profile.layers},
        "tensors": [dataclasses.asdict(tensor) for tensor in profile.tensors],
    }


def alike(profile: Profile) -> list[list[str]]:
    """Return groups of layers that keep equal tensors, in order."""
    groups: dict[Any, list[str]] = {}
    for layer in profile.layers:
        groups.setdefault(tuple(_counts(profile, layer).items()), []).append(layer)
    return list(groups.values())


def _counts(profile: Profile, layer: str) -> Counter[KeptTensor]:
    """Return how often the layer keeps each tensor, by segment."""
    tensors = [
        dataclasses.replace(tensor, layer="") for tensor in profile.tensors if tensor.layer == layer
    ]
    return Counter(sorted(tensors, key=lambda tensor: SEGMENTS.index(tensor.segment)))


def name_of(layers: Sequence[str]) -> str:
    """Return "layers.1-4, 6" for layers.1, ..., layers.4, layers.6."""
    if len(layers) == 1:
        return layers[0]
    numbers = [int(layer.rpartition(".")[2]) for layer in layers]
    # the difference is the same as long as the numbers are adjacent
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return "layers." + ", ".join(first_to_last([number for _, number in run]) for _, run in runs)


def print_tensors(profile: Profile, console: Console) -> None:
    """Print every kept tensor of every layer; equal layers are printed once."""
    for layers in alike(profile):
        table = titled_table(
            name_of(layers) + (f": {len(layers)} layers, each" * (len(layers) > 1))
        )
        for name in ("made by", "shape", "dtype", "MiB", "holds"):
            table.add_column(name, justify="right" if name == "MiB" else "left")
        for segment, group in groupby(
            _counts(profile, layers[0]).items(), lambda item: item[0].segment
        ):
            size = _in(profile.bytes(layers[0], segment), MIB)
            table.add_row(profile.title(segment), "", "", size, "", style="bold")
            for tensor, count in group:
                shape = " x ".join(map(str, tensor.shape)) or "scalar"
                table.add_row(
                    f"  {tensor.made_by}",
                    f"{count} of {shape}" if count > 1 else shape,
                    tensor.dtype,
                    _in(count * tensor.bytes, MIB),
                    "rounded weight" if tensor.is_weight else "activation",
                )
        console.print(table)


def print_totals(profile: Profile, console: Console) -> None:
    """Print MiB of activations per layer and segment, of rounded weights per layer, and totals."""
    total = profile.by_segment()
    columns = (*map(profile.title, total), "activations", "rounded weights")
    table = titled_table("kept for backward, each storage once", ["MiB"], columns)
    rows = {name_of(layers) + " (each)" * (len(layers) > 1): layers[0] for layers in alike(profile)}
    for name, layer in {**rows, "model": None}.items():
        if layer is None:
            table.add_section()
        sizes = profile.by_segment(layer)
        numbers = (*(sizes.get(segment, 0) for segment in total), sum(sizes.values()))
        table.add_row(
            name, *(_in(size, MIB) for size in (*numbers, profile.bytes(layer, weights=True)))
        )
    per_token = (size / profile.num_tokens for size in (*total.values(), profile.bytes()))
    table.add_row("KiB per token", *(_in(size, KIB) for size in per_token), "")
    console.print(table)


def print_comparison(profiles: Mapping[str, Profile], console: Console) -> None:
    """Print KiB of activations per token and segment in each memory mode, with the ratio to
    `BASELINE`."""
    columns = [
        column
        for mode in profiles
        for column in ([mode] if mode == BASELINE else [mode, f"to {BASELINE}"])
    ]
    table = titled_table("activations kept for backward", ["KiB per token"], columns)
    present = {segment for profile in profiles.values() for segment in profile.by_segment()}
    for segment in (*filter(present.__contains__, SEGMENTS), None):
        if segment is None:
            table.add_section()
        base = profiles[BASELINE].bytes(segment=segment)
        cells: list[str] = []
        for mode, profile in profiles.items():
            size = profile.bytes(segment=segment)
            cells.append(_in(size / profile.num_tokens, KIB))
            if mode != BASELINE:
                cells.append(f"{size / base:.2f} x" if base else "-")
        table.add_row(profiles[BASELINE].title(segment or "model"), *cells)
    console.print(table)


def _in(size: float, scale: int) -> str:
    """Write a size for a table, where nothing is a dash."""
    return f"{size / scale:,.2f}" if size else "-"


def draw(
    bars: Mapping[str, Mapping[str, float]],
    title: str,
    out: Path,
    title_of: Callable[[str], str] = str,
) -> None:
    """Draw bytes per token as a bar for each name, stacked by segment, with its sum above it.
    `title_of` names a segment in the legend. Raises UserError if `out` cannot be written."""
    width = max(6.0, min(18.0, 4.0 + 0.45 * len(bars)))
    figure = Figure(figsize=(width, 4.8), layout="constrained")
    axes = figure.subplots()
    sums = [sum(sizes.values()) for sizes in bars.values()]
    unit, scale = unit_of(max(*sums, KIB))
    bottom = np.zeros(len(bars))
    for segment in SEGMENTS:
        heights = np.array([sizes.get(segment, 0.0) for sizes in bars.values()]) / scale
        if heights.any():
            color, label = COLORS[segment], title_of(segment)
            axes.bar(range(len(bars)), heights, 0.72, bottom, color=color, label=label)
        bottom += heights
    for index, size in enumerate(sums):
        axes.annotate(
            f"{size / scale:,.2f}", (index, size / scale), (0, 3), ha="center", fontsize=8,
            textcoords="offset points",
        )  # fmt: skip
    axes.set_xticks(range(len(bars)), [name.removeprefix("layers.") for name in bars])
    axes.set_ylabel(f"{unit} of activations per token")
    axes.set_ylim(0, 1.1 * max(*sums, KIB) / scale)
    axes.set_title(title, fontsize=10)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right upper", frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    with whole_file(out, "--out") as aside:
        figure.savefig(aside, dpi=110, format="png")
