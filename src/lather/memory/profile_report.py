"""Reports a profile of saved tensors: a list, tables of totals, JSON, and stacked bars.

Layers that keep the same are shown once. Sizes per token are of activations only: weights and their
copies do not grow with the tokens."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from lather.console import titled_table
from lather.files import whole_file
from lather.memory.profile import KINDS, SEGMENTS, SavedStorage, SavedTensors

COLORS = dict(
    zip(
        SEGMENTS,
        (
            "0.35",
            "#4477aa",
            "#66ccee",
            "#ee6677",
            "#ccbb44",
            "#228833",
            "0.65",
            "#aa3377",
            "#bbbbbb",
        ),
        strict=True,
    )
)
"""A color for each segment, distinguishable with any color vision."""

BACKWARD = re.compile(r"Backward\d*(?=\.|$)")
"""Suffix that autograd adds to an operation's name."""

# --- JSON -----------------------------------------------------------------------------------------


def to_json(profile: SavedTensors) -> dict[str, Any]:
    """Return plain values: totals for the reader, and every storage; `from_json` restores the
    profile."""
    return {
        "num_tokens": profile.num_tokens,
        "activation_bytes_per_token": profile.per_token(profile.bytes("activation")),
        "bytes": profile.by_kind(),
        "activation_bytes_per_segment": profile.by_segment(),
        "layers": {layer: _layer_json(profile, layer) for layer in profile.layers()},
        "storages": [dataclasses.asdict(one) for one in profile.storages],
    }


def _layer_json(profile: SavedTensors, layer: str) -> dict[str, Any]:
    segments = {segment: size for segment, size in profile.by_segment(layer).items() if size}
    return {"bytes": profile.by_kind(layer), "activation_bytes_per_segment": segments}


# --- alike layers ---------------------------------------------------------------------------------


def lines_of(profile: SavedTensors, layer: str) -> list[tuple[SavedStorage, int]]:
    """Return the lines of a layer, each with its number of storages; storages of the same segment,
    saver, kind and row shape form one line.

    A line is a storage with the bytes of all, and with names relative to the layer; the first dim
    is -1 if it differs between them."""
    groups: dict[Any, list[SavedStorage]] = {}
    for one in profile.storages:
        if one.layer == layer:
            rows = one.shape if one.kind == "weight" else one.shape[1:]
            key = (
                one.segment,
                one.module,
                one.saved_by,
                one.dtype,
                one.kind,
                len(one.shape),
                rows,
                one.weight,
            )
            groups.setdefault(key, []).append(one)
    ordered = sorted(groups.values(), key=lambda group: SEGMENTS.index(group[0].segment))
    return [(_line(group, layer), len(group)) for group in ordered]


def _line(group: Sequence[SavedStorage], layer: str) -> SavedStorage:
    first = group[0]
    module = first.module.removeprefix(layer).removeprefix(".")
    same = len({one.shape for one in group}) == 1
    return dataclasses.replace(
        first,
        layer="",
        module=module,
        saved_by=": ".join(part for part in (module, first.saved_by or "(no name)") if part),
        shape=first.shape if same else (-1, *first.shape[1:]),
        bytes=sum(one.bytes for one in group),
        weight=first.weight.removeprefix(f"{layer}."),
        num_saves=0,
        also_saved_in=tuple(
            dict.fromkeys(
                place.removeprefix(f"{layer} ") for one in group for place in one.also_saved_in
            )
        ),
    )


def alike(profile: SavedTensors) -> list[list[str]]:
    """Return groups of layers that keep the same bytes in the same way, in order."""
    groups: dict[Any, list[str]] = {}
    for layer in profile.layers():
        lines = tuple(
            dataclasses.replace(line, also_saved_in=()) for line, _ in lines_of(profile, layer)
        )
        groups.setdefault(lines, []).append(layer)
    return list(groups.values())


def name_of(layers: Sequence[str]) -> str:
    """Return "layers.1-4, 6" for layers.1, ..., layers.4, layers.6."""
    if len(layers) == 1 or not all(layer.rpartition(".")[2].isdigit() for layer in layers):
        return ", ".join(layers)
    numbers = [int(layer.rpartition(".")[2]) for layer in layers]
    # the difference is the same as long as the numbers are adjacent
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return f"{layers[0].rpartition('.')[0]}." + ", ".join(
        first_to_last([number for _, number in run]) for _, run in runs
    )


def first_to_last(numbers: Sequence[int]) -> str:
    """Return "3-5", or "3" for a single number."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


# --- tables ---------------------------------------------------------------------------------------


def print_tensors(profile: SavedTensors, console: Console) -> None:
    """Print every saved tensor of every layer; equal layers are printed once."""
    for layers in alike(profile):
        table = titled_table(
            name_of(layers) + (f": {len(layers)} layers, each" if len(layers) > 1 else "")
        )
        for name in ("saved by", "shape", "dtype", "kind", "size", "weight, or also saved in"):
            table.add_column(
                name,
                justify="right" if name == "size" else "left",
                no_wrap=name in ("dtype", "kind", "size"),
            )
        segment = ""
        for line, count in lines_of(profile, layers[0]):
            if line.segment != segment:
                segment = line.segment
                table.add_row(
                    segment,
                    "",
                    "",
                    "",
                    _size(profile.bytes(layer=layers[0], segment=segment)),
                    style="bold",
                )
            shape = " x ".join("n" if size < 0 else str(size) for size in line.shape) or "scalar"
            saved_by, also = (
                f"  {BACKWARD.sub('', line.saved_by)}",
                line.weight or _shortened(line.also_saved_in),
            )
            table.add_row(
                saved_by,
                f"{count} of {shape}" if count > 1 else shape,
                line.dtype,
                line.kind,
                _size(line.bytes),
                also,
            )
        console.print(table)


def _shortened(places: Sequence[str]) -> str:
    text = ", ".join(places)
    return text if len(text) <= 24 else f"{len(places)} other segments"


def print_totals(profile: SavedTensors, console: Console) -> None:
    """Print MiB of activations per layer and segment, of weights and copies per layer, and
    totals."""
    totals = {segment: size for segment, size in profile.by_segment().items() if size}
    table = titled_table(
        "kept for backward, each storage once",
        ["MiB"],
        (*totals, "activations", "weight copies", "weights"),
    )
    table.columns[0].no_wrap = True
    for layers in alike(profile):
        sizes = profile.by_segment(layers[0])
        numbers = [*(sizes[segment] for segment in totals), *profile.by_kind(layers[0]).values()]
        table.add_row(
            name_of(layers) + (" (each)" if len(layers) > 1 else ""), *map(in_mib, numbers)
        )
    table.add_section()
    table.add_row(
        "model", *map(in_mib, (*totals.values(), *profile.by_kind().values())), style="bold"
    )
    per_token = (
        _kib(profile.per_token(size)) for size in (*totals.values(), profile.bytes("activation"))
    )
    table.add_row("KiB per token", *per_token, "", "")
    console.print(table)


def print_comparison(profiles: Mapping[str, SavedTensors], baseline: str, console: Console) -> None:
    """Print KiB of activations per token and segment in each memory mode, with the ratio to
    `baseline`."""
    columns = [
        column
        for mode in profiles
        for column in ([mode] if mode == baseline else [mode, f"to {baseline}"])
    ]
    table = titled_table("activations kept for backward", ["KiB per token"], columns)
    for segment in (
        segment
        for segment in SEGMENTS
        if any(segment in profile.segments() for profile in profiles.values())
    ):
        table.add_row(segment, *_compared(profiles, baseline, segment))
    table.add_section()
    table.add_row("model", *_compared(profiles, baseline, None), style="bold")
    for kind in KINDS:
        cells: list[str] = []
        for mode, profile in profiles.items():
            cells += [in_mib(profile.bytes(kind))] + [""] * (mode != baseline)
        table.add_row(f"{kind}, MiB", *cells)
    console.print(table)


def _compared(
    profiles: Mapping[str, SavedTensors], baseline: str, segment: str | None
) -> Iterable[str]:
    base = profiles[baseline].bytes("activation", segment=segment)
    for mode, profile in profiles.items():
        size = profile.bytes("activation", segment=segment)
        yield _kib(profile.per_token(size))
        if mode != baseline:
            yield f"{size / base:.2f} x" if base else "-"


def in_mib(size: float) -> str:
    """A size in MiB for a table, where nothing is a dash."""
    return f"{size / 2**20:,.2f}" if size else "-"


def _kib(size: float) -> str:
    return f"{size / 2**10:,.2f}" if size else "-"


# --- pictures -------------------------------------------------------------------------------------


def draw(profile: SavedTensors, title: str, out: Path) -> None:
    """Draw activations per token as a bar per layer, stacked by segment. Raises UserError if `out`
    cannot be written."""
    layers = profile.layers()
    sizes = [_per_token(profile, layer) for layer in layers]
    figure = Figure(
        figsize=(max(8.0, min(18.0, 4.0 + 0.45 * len(layers))), 4.6), layout="constrained"
    )
    axes = figure.subplots()
    unit, scale = _stack(axes, sizes, headroom=0.05)
    axes.set_xticks(
        range(len(layers)),
        [layer.removeprefix("layers.").removesuffix("_tokens") for layer in layers],
    )
    total, copies = profile.bytes("activation"), profile.bytes("weight copy")
    per_token = f"{profile.per_token(total) / scale:,.2f} {unit}"
    line = f"{per_token} of activations per token, {_size(total)} in all" + (
        f"; weight copies {_size(copies)}" if copies else ""
    )
    axes.set(xlabel="layer", ylabel=f"{unit} per token")
    axes.set_title(f"{title}\n{line}", fontsize=10)
    _save(figure, axes, out)


def draw_comparison(
    profiles: Mapping[str, SavedTensors], baseline: str, title: str, out: Path
) -> None:
    """Draw activations per token as a bar per memory mode, stacked by segment. Raises UserError if
    `out` cannot be written."""
    sizes = [_per_token(profile, None) for profile in profiles.values()]
    figure = Figure(figsize=(3.6 + 1.6 * len(profiles), 4.8), layout="constrained")
    axes = figure.subplots()
    unit, scale = _stack(axes, sizes, headroom=0.16, labels=True)
    base = profiles[baseline].bytes("activation")
    for index, (mode, profile) in enumerate(profiles.items()):
        total = profile.bytes("activation")
        ratio = f"\n{total / base:.2f} x" if mode != baseline and base else ""
        text, top = (
            f"{profile.per_token(total) / scale:,.2f} {unit}{ratio}",
            sum(sizes[index].values()) / scale,
        )
        axes.annotate(
            text, (index, top), (0, 4), ha="center", va="bottom", textcoords="offset points"
        )
    axes.set_xticks(range(len(profiles)), list(profiles))
    axes.set_ylabel(f"{unit} of activations per token")
    axes.set_title(title, fontsize=10)
    _save(figure, axes, out)


def _per_token(profile: SavedTensors, layer: str | None) -> dict[str, float]:
    """Return the bytes of activations per token in each segment, of a layer or of the model."""
    return {segment: profile.per_token(size) for segment, size in profile.by_segment(layer).items()}


def _stack(
    axes: Axes, sizes: Sequence[Mapping[str, float]], *, headroom: float, labels: bool = False
) -> tuple[str, int]:
    """Draw bars stacked in the order of a forward pass, the first segment at the bottom; with
    `labels` the larger parts carry their number.

    Returns the axis's unit, which the highest bar determines, and the unit's bytes.
    """
    bottom = np.zeros(len(sizes))
    highest = max((sum(one.values()) for one in sizes), default=0.0)
    unit, scale = unit_of(max(highest, 2**10))
    for segment in SEGMENTS:
        heights = np.array([one.get(segment, 0.0) for one in sizes])
        if not heights.any():
            continue
        bars = axes.bar(
            range(len(sizes)),
            heights / scale,
            0.72,
            bottom=bottom / scale,
            color=COLORS[segment],
            label=segment,
        )
        if labels:
            texts = [
                f"{height / scale:,.2f}" if height > 0.06 * highest else "" for height in heights
            ]
            axes.bar_label(bars, texts, label_type="center", fontsize=8)
        bottom += heights
    # explicit, since a bar of height 0 on another would remove the margin
    axes.set_ylim(0, (1 + headroom) * highest / scale or 1)
    return unit, scale


def unit_of(size: float) -> tuple[str, int]:
    """Return the largest unit that is not larger than `size`, and its bytes."""
    return next(
        (
            (unit, scale)
            for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
            if size >= scale
        ),
        ("B", 1),
    )


def _size(size: float) -> str:
    unit, scale = unit_of(size)
    return f"{size / scale:.2f} {unit}" if scale > 1 else f"{size:.0f} B"


def _save(figure: Figure, axes: Axes, out: Path) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right upper", frameon=False, fontsize=9)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    with whole_file(out, "--out") as aside:
        figure.savefig(aside, dpi=110, format="png")
