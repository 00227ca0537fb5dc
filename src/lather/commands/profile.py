"""`lather profile CONFIG`: lists the activations that each layer of a model keeps for backward.

No data is read, and no GPU is needed. With `data.packed_attention` each sequence holds four
documents of equal length.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch

import lather
from lather.argument import Argument
from lather.commands.parsing import check_writable
from lather.commands.with_config import parse_with_config
from lather.config.config import Config
from lather.config.ranks import check_parallel
from lather.console import command_console
from lather.device import is_gpu
from lather.engine.step import pick_device
from lather.files import write_numbers
from lather.memory import profile_report as report
from lather.memory.dry_rank import DOCUMENTS
from lather.memory.profile import Profile, micro_batch_size, profile
from lather.memory.workers import Assumed, worker_processes
from lather.models.gated_mlp import MEMORY_MODES


@dataclass(frozen=True)
class ProfileArguments:
    """List the tensors that the forward pass of one micro-batch keeps for backward, by layer and
    segment."""

    config: Annotated[Config, Argument(inline=True)] = field(default_factory=Config)
    compare: bool = False
    """Show the totals of all memory modes side by side."""
    out: Path | None = None
    """PNG file to write."""
    json: Path | None = None
    """JSON file to write all numbers to."""


def profile_command(arguments: list[str]) -> None:
    """Profile the micro-batch, write the files that were asked for, and print the tables."""
    parsed, name = parse_with_config(ProfileArguments, "profile", arguments)
    check_writable(parsed.out, parsed.json)
    config, parallel = parsed.config, parsed.config.parallel
    check_parallel(config, parallel.pp * parallel.cp * parallel.ep * parallel.replicas)
    modes = MEMORY_MODES if parsed.compare else (config.moe.memory,)
    assumed = Assumed("gpu" if is_gpu(pick_device(config.train.device)) else "cpu")
    configs = [replace(config, moe=replace(config.moe, memory=mode)) for mode in modes]  # type: ignore[arg-type]
    with worker_processes() as pool:
        results = pool.map(profile, configs, [assumed] * len(configs))
        profiles = dict(zip(modes, results, strict=True))
    if parsed.json:
        write_numbers(parsed.json, _document(config, profiles))
    if parsed.out:
        _draw(parsed.out, f"{name}: kept for backward\n{_batch(config)}", profiles)
    console = command_console()
    if parsed.compare:
        report.print_comparison(profiles, console)
    else:
        report.print_tensors(profiles[config.moe.memory], console)
        report.print_totals(profiles[config.moe.memory], console)
    console.print(f"one micro-batch of {_batch(config)}, memory {' '.join(modes)}", highlight=False)
    for path in filter(None, (parsed.json, parsed.out)):
        print(path)


def _draw(out: Path, title: str, profiles: dict[str, Profile]) -> None:
    """Draw a bar for each memory mode, or for each layer if there is one mode."""
    if len(profiles) > 1:
        sizes = {mode: (result, result.by_segment()) for mode, result in profiles.items()}
    else:
        ((mode, result),) = profiles.items()
        title = f"{title}, memory {mode}"
        sizes = {layer: (result, result.by_segment(layer)) for layer in result.layers}
    bars = {
        name: {segment: size / result.num_tokens for segment, size in by_segment.items()}
        for name, (result, by_segment) in sizes.items()
    }
    report.draw(bars, title, out, next(iter(profiles.values())).title)


def _batch(config: Config) -> str:
    train = config.train
    documents = f", {DOCUMENTS} documents per sequence" if config.data.is_per_document else ""
    slices = f" / {config.parallel.cp} context ranks" if config.parallel.cp > 1 else ""
    size = f"{micro_batch_size(config)} x {train.sequence_length} tokens{slices}"
    return f"{size}, {train.precision}{documents}"


def _document(config: Config, profiles: dict[str, Profile]) -> dict[str, Any]:
    return {
        "lather": lather.__version__,
        "torch": torch.__version__,
        "model": dataclasses.asdict(config.model),
        "micro_batch_size": micro_batch_size(config),
        "sequence_length": config.train.sequence_length,
        "precision": config.train.precision,
        "documents_per_sequence": DOCUMENTS if config.data.is_per_document else 1,
        "profiles": {mode: report.to_json(result) for mode, result in profiles.items()},
    }
