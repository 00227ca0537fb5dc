"""`lather profile CONFIG`: lists the activations that each layer of a model keeps for backward.

The micro-batch consists of random tokens: no data is read, and no rank is started. With
`data.packed_attention` each sequence holds four documents of equal length.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.console import Console
from torch import Tensor

import lather
from lather.argument import Argument
from lather.commands.with_config import parse_with_config
from lather.config.config import Config, check_parallel
from lather.console import command_console
from lather.engine.engine import build_model, document_boundaries
from lather.engine.step import pick_device
from lather.errors import UserError
from lather.files import write_numbers
from lather.memory import profile_report as report
from lather.memory.block_samples import SampledBlocks, keep_two_of_each, materialize
from lather.memory.dry_run import DOCUMENTS, batch_of
from lather.memory.profile import SavedTensors, profile_saved_tensors
from lather.models.decoder import Decoder, DecoderOutput
from lather.models.layers import MEMORY_MODES

MOST_PARAMETERS = 300_000_000
"""Up to this number of parameters, `--layers auto` runs the whole model."""

BASELINE = "reference"
"""Memory mode with which the others are compared."""


@dataclass(frozen=True)
class ProfileArguments:
    """List the tensors that a forward pass of one micro-batch keeps for backward, by layer and
    segment."""

    config: Annotated[Config, Argument(inline=True)] = field(default_factory=Config)
    compare: bool = False
    """Run all memory modes and show their totals side by side."""
    layers: Literal["auto", "all", "distinct"] = "auto"
    """all: run every layer. distinct: run two layers of each kind; the others count like the
    second. auto: all, up to 300 M parameters."""
    out: Path | None = None
    """PNG file to write."""
    json: Path | None = None
    """JSON file to write all numbers to."""


@dataclass(frozen=True)
class ProfileFound:
    """The result of a command with these arguments."""

    parsed: ProfileArguments
    profiles: dict[str, SavedTensors]
    """By memory mode."""
    cut: SampledBlocks | None
    """The blocks that were run, if not all were."""


def profile_command(arguments: list[str]) -> None:
    """Run the micro-batch, write the files that were asked for, and print the tables."""
    parsed, name = parse_with_config(ProfileArguments, "profile", arguments)
    for path in filter(None, (parsed.out, parsed.json)):
        if not path.absolute().parent.is_dir():
            raise UserError(
                f"{path}: cannot be written (no such folder): make {path.parent} or name another "
                "file"
            )
        if path.is_dir():
            raise UserError(
                f"{path}: cannot be written (a folder): name a file, {path / 'profile'} for example"
            )

    check_parallel(parsed.config, parsed.config.parallel.pp * data_ranks(parsed.config))
    model, cut = build(parsed.config, parsed.layers)
    found = ProfileFound(parsed, {}, cut)
    for mode in MEMORY_MODES if parsed.compare else (parsed.config.moe.memory,):
        model.set_memory(mode)
        profile = profile_micro_batch(model, parsed.config)
        found.profiles[mode] = cut.restore(profile) if cut else profile
    write(found, name)
    show(found, command_console())


def build(
    config: Config, layers: Literal["auto", "all", "distinct"]
) -> tuple[Decoder, SampledBlocks | None]:
    """Build the model; or, with random weights, a model with two blocks of each kind, and the
    record of the blocks that were left out."""
    device = pick_device(config.train.device)
    if layers != "all":
        model = build_model(config, torch.device("meta"))
        if layers == "distinct" or sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
            cut = keep_two_of_each(model)
            materialize(model, device, torch.Generator().manual_seed(config.seed))
            return model, cut
    return build_model(config, device), None


def profile_micro_batch(model: Decoder, config: Config) -> SavedTensors:
    """Return the tensors that the forward pass of a training step keeps for one micro-batch of
    random tokens.

    If documents are separated, each sequence holds `DOCUMENTS` of them, of about equal length; if
    they are packed whole, one position is padding (`batch_of`).
    """
    tokens, boundaries, padding_BS = _random_batch(config, next(model.parameters()).device)

    def losses() -> list[Tensor]:
        with torch.autocast(
            tokens.device.type, dtype=torch.bfloat16, enabled=config.train.precision == "bf16"
        ):
            output: DecoderOutput = model(
                tokens[:, :-1],
                tokens[:, 1:],
                cu_seqlens=boundaries,
                padding_BS=padding_BS,
            )
        assert output.loss is not None
        return [
            output.loss,
            output.balance_loss(),
            *([output.z_loss()] if config.moe.z_loss_coefficient else []),
        ]

    return profile_saved_tensors(model, losses, num_tokens=tokens[:, 1:].numel())


def _random_batch(
    config: Config,
    device: torch.device,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return random tokens (B, S + 1), the boundaries of the documents, and the padding (B, S)."""
    size, length = micro_batch_size(config), config.train.sequence_length
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(config.model.vocab_size, (size, length + 1), generator=generator).to(
        device
    )
    batch = batch_of(config, size, size)
    boundaries = None if batch.begins_BS is None else document_boundaries(batch.begins_BS)
    return tokens, boundaries, batch.padding_BS


def data_ranks(config: Config) -> int:
    """Return the number of data ranks of the smallest mesh, whose dp is `parallel.replicas`."""
    return config.parallel.ep * config.parallel.replicas


def micro_batch_size(config: Config) -> int:
    return config.train.batch_size // (
        data_ranks(config) * config.num_micro_batches(data_ranks(config))
    )


def write(found: ProfileFound, name: str) -> None:
    """Write the JSON file and the picture; `name` is that of the configuration."""
    parsed = found.parsed
    if parsed.json:
        write_numbers(parsed.json, _document(found))
    if parsed.out:
        title, batch = f"{name}: kept for backward", _batch(parsed.config)
        if parsed.compare:
            report.draw_comparison(found.profiles, BASELINE, f"{title}\n{batch}", parsed.out)
        else:
            ((mode, profile),) = found.profiles.items()
            report.draw(profile, f"{title}, memory {mode!r}\n{batch}", parsed.out)


def _batch(config: Config) -> str:
    train = config.train
    documents = f", {DOCUMENTS} documents per sequence" if config.data.is_per_document else ""
    return (
        f"{micro_batch_size(config)} x {train.sequence_length} tokens, {train.precision}{documents}"
    )


def show(found: ProfileFound, console: Console) -> None:
    """Print the tables, and the names of the written files."""
    parsed, batch, cut = (
        found.parsed,
        f"one micro-batch of {_batch(found.parsed.config)}",
        found.cut,
    )
    if parsed.compare:
        report.print_comparison(found.profiles, BASELINE, console)
        console.print(batch)
    else:
        ((mode, profile),) = found.profiles.items()
        report.print_tensors(profile, console)
        report.print_totals(profile, console)
        console.print(f"{batch}, memory {mode!r}")
    if cut:
        console.print(
            f"measured on {len(cut.kept)} of {parsed.config.model.num_hidden_layers} blocks, two "
            "of each kind; "
            "the others count like the second of their kind"
        )
    for path in filter(None, (parsed.json, parsed.out)):
        print(path)


def _document(found: ProfileFound) -> dict[str, Any]:
    config = found.parsed.config
    return {
        "lather": lather.__version__,
        "torch": torch.__version__,
        "model": dataclasses.asdict(config.model),
        "micro_batch_size": micro_batch_size(config),
        "sequence_length": config.train.sequence_length,
        "precision": config.train.precision,
        "documents_per_sequence": DOCUMENTS if config.data.is_per_document else 1,
        "measured_blocks": list(found.cut.kept) if found.cut else "all",
        "profiles": {mode: report.to_json(profile) for mode, profile in found.profiles.items()},
    }
