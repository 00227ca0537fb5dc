"""`lather profile CONFIG`: what each layer of a model keeps between forward and backward.

The micro-batch is random tokens: no data is read. With `data.packed_attention` each sequence is four documents of a quarter of its length.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from torch import Tensor

import lather
from lather.commands.parsing import parse_arguments
from lather.console import wide_console
from lather.errors import ConfigError, UserError
from lather.memory import report
from lather.memory.distinct import Cut, keep_two_of_each, materialize
from lather.memory.profile import SavedTensors, profile_saved_tensors
from lather.models.decoder import Decoder, DecoderOutput
from lather.models.layers import MEMORY_MODES
from lather.train.config import Config
from lather.train.config_file import load_config
from lather.train.engine import document_boundaries
from lather.train.loop import build_model
from lather.train.step import pick_device

DOCUMENTS = 4
"""Of a sequence, with `data.packed_attention`."""

MOST_PARAMETERS = 300_000_000
"""Up to this many, `--layers auto` runs the whole model."""

BASELINE = "reference"
"""The memory mode that the others are compared with."""


@dataclass(frozen=True)
class ProfileArguments:
    """List the tensors that a forward pass of one micro-batch keeps for backward, per layer and segment."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    compare: bool = False
    """Run all memory modes and show their totals side by side."""
    layers: Literal["auto", "all", "distinct"] = "auto"
    """all: run every layer. distinct: run two of each kind and count the others like the second. auto: all up to 300 M parameters."""
    out: Path | None = None
    """Picture to write, PNG."""
    json: Path | None = None
    """File to write every number to."""


def profile_command(arguments: list[str]) -> int:
    """Run the micro-batch, write what is asked for, print the tables."""
    file = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if file is None and not {"-h", "--help"} & set(arguments):
        raise ConfigError("lather profile needs a configuration first: lather profile configs/quickstart.toml")
    default = ProfileArguments(load_config(Path(file)) if file else Config())
    parsed = parse_arguments(ProfileArguments, "lather profile CONFIG", arguments[1:] if file else arguments, default=default)
    for path in filter(None, (parsed.out, parsed.json)):
        if not path.absolute().parent.is_dir():
            raise UserError(f"{path}: cannot be written (no such folder): make {path.parent} or name another file")
        if path.is_dir():
            raise UserError(f"{path}: cannot be written (a folder): name a file, {path / 'profile'} for example")

    modes = MEMORY_MODES if parsed.compare else (parsed.config.moe.memory,)
    model, cut = build(parsed.config, parsed.layers)
    profiles: dict[str, SavedTensors] = {}
    for mode in modes:
        model.set_memory(mode)
        profile = profile_micro_batch(model, parsed.config)
        profiles[mode] = cut.restore(profile) if cut else profile
    write(parsed, Path(file or "").stem, profiles, cut)
    show(parsed, profiles, cut, wide_console(150))
    return 0


def build(config: Config, layers: Literal["auto", "all", "distinct"]) -> tuple[Decoder, Cut | None]:
    """The model, or two blocks of each kind of it with random weights, and what was cut."""
    device = pick_device(config.train.device)
    if layers != "all":
        with torch.device("meta"):
            model = build_model(config, torch.device("meta"))
        if layers == "distinct" or sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
            cut = keep_two_of_each(model)
            materialize(model, device, torch.Generator().manual_seed(config.seed))
            return model, cut
    return build_model(config, device), None


def profile_micro_batch(model: Decoder, config: Config) -> SavedTensors:
    """What the forward pass of a training step keeps for one micro-batch of random tokens.

    With `data.packed_attention` attention stays within documents, of which a sequence has `DOCUMENTS` of about the same length.
    """
    train, device = config.train, next(model.parameters()).device
    shape = (train.micro_batch_size, train.sequence_length + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(config.seed)).to(device)
    length = math.ceil(train.sequence_length / DOCUMENTS)
    is_last_BS = (torch.arange(1, train.sequence_length + 1) % length == 0).long().expand(train.micro_batch_size, -1)
    boundaries = document_boundaries(is_last_BS, end_of_text=1) if config.data.packed_attention else None

    def losses() -> list[Tensor]:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=train.precision == "bf16"):
            output: DecoderOutput = model(tokens[:, :-1], tokens[:, 1:], cu_seqlens=boundaries)
        assert output.loss is not None
        return [output.loss, output.balance_loss(), *([output.z_loss()] if config.moe.z_loss_coefficient else [])]

    return profile_saved_tensors(model, losses, num_tokens=train.micro_batch_size * train.sequence_length)


def write(parsed: ProfileArguments, name: str, profiles: dict[str, SavedTensors], cut: Cut | None) -> None:
    """JSON and picture; `name` is the configuration's."""
    if parsed.json:
        report.write_json(_document(parsed.config, profiles, cut), parsed.json)
    if parsed.out:
        title, batch = f"{name}: kept for backward", _batch(parsed.config)
        if parsed.compare:
            report.draw_comparison(profiles, BASELINE, f"{title}\n{batch}", parsed.out)
        else:
            mode, profile = next(iter(profiles.items()))
            report.draw(profile, f"{title}, memory {mode!r}\n{batch}", parsed.out)


def _batch(config: Config) -> str:
    train = config.train
    documents = f", {DOCUMENTS} documents per sequence" if config.data.packed_attention else ""
    return f"{train.micro_batch_size} x {train.sequence_length} tokens, {train.precision}{documents}"


def show(parsed: ProfileArguments, profiles: dict[str, SavedTensors], cut: Cut | None, console: Console) -> None:
    """Tables on `console`, and the names of the files."""
    if parsed.compare:
        report.print_comparison(profiles, BASELINE, console)
    else:
        (profile,) = profiles.values()
        report.print_tensors(profile, console)
        report.print_totals(profile, console)
    console.print(f"one micro-batch of {_batch(parsed.config)}" + ("" if parsed.compare else f", memory {next(iter(profiles))!r}"))
    if cut:
        console.print(
            f"measured on {len(cut.kept)} of {cut.num_blocks} blocks, two of each kind; the others count like the second of their kind"
        )
    for path in filter(None, (parsed.json, parsed.out)):
        console.print(f"{path}", soft_wrap=True)


def _document(config: Config, profiles: dict[str, SavedTensors], cut: Cut | None) -> dict[str, Any]:
    return {
        "lather": lather.__version__,
        "torch": torch.__version__,
        "model": dataclasses.asdict(config.model),
        "micro_batch_size": config.train.micro_batch_size,
        "sequence_length": config.train.sequence_length,
        "precision": config.train.precision,
        "documents_per_sequence": DOCUMENTS if config.data.packed_attention else 1,
        "measured_blocks": list(cut.kept) if cut else "all",
        "profiles": {mode: report.to_json(profile) for mode, profile in profiles.items()},
    }
