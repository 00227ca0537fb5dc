"""The data of a run: the data sets that its configuration names, or, for a run that started with
data sets of format 1, that data set."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lather.config.config import Config
from lather.data.batches import Batches, HeldOut, Source
from lather.data.dataset import TOKENIZER
from lather.data.documents import load_tokenizer
from lather.data.format1 import PermutedOrder, ShardWindows, data_set_of_format_1
from lather.data.opening import held_out_sets, open_datasets, training_batches
from lather.data.order import MixturePhase
from lather.errors import DataError


@dataclass(frozen=True)
class RunData:
    """Batches to train on, and held-out sequences to evaluate on."""

    batches: Batches
    held_out: dict[str, HeldOut]
    """Held-out sets by name; the loss of the first one is the run's validation loss."""
    tokenizer: Path | None
    identities: dict[str, str]
    """Identity of each data set, by its folder."""


def open_run_data(
    config: Config,
    report: Callable[[str], None],
    begun_with: str | None = None,
    phases: Sequence[MixturePhase] = (),
) -> RunData:
    """Open the data sets; those that do not exist yet are made. `begun_with`: name of the data set
    of format 1 with which the run started; `phases`: the data mixtures that the run has had; empty:
    only one.

    Raises DataError if a data set or its tokenizer is missing or damaged.
    """
    data = (
        _of_format_1(config, begun_with, report)
        if begun_with
        else _of_configuration(config, report, phases)
    )
    if data.tokenizer is not None:
        load_tokenizer(data.tokenizer, f"delete {data.tokenizer.parent} to make the data set again")
    return data


def check_same_data(data: RunData, identities: dict[str, str]) -> None:
    """Raise DataError unless this rank has the same data sets as rank 0."""
    if list(data.identities.values()) != list(identities.values()):
        raise DataError(
            f"the data sets on {platform.node()} ({', '.join(data.identities)}) are not those of "
            "rank 0 "
            f"({', '.join(identities)}): give all ranks the same ones, as copies or on a shared "
            "file system"
        )


def _of_configuration(
    config: Config, report: Callable[[str], None], phases: Sequence[MixturePhase]
) -> RunData:
    train, vocab_size = config.train, config.model.vocab_size
    datasets = open_datasets(config.data, vocab_size, report)
    return RunData(
        training_batches(
            datasets, config.data, train.sequence_length, train.batch_size, config.seed, phases
        ),
        held_out_sets(
            datasets, config.data, train.sequence_length, train.validation_sequences, vocab_size
        ),
        next((dataset.tokenizer for dataset in datasets if dataset.tokenizer), None),
        {str(dataset.folder): dataset.manifest.identity for dataset in datasets},
    )


def _of_format_1(config: Config, name: str, report: Callable[[str], None]) -> RunData:
    train, apart = config.train, config.data.packed_attention
    if config.data.path:
        raise DataError(
            f"data.path = {list(config.data.path)} in a run that was started with data.source and "
            "continues with it: leave data.path out"
        )
    folder = data_set_of_format_1(config.data, config.model.vocab_size, name, report)
    tokenizer = folder / TOKENIZER
    end = (
        load_tokenizer(tokenizer, "restore it").token_to_id(config.data.end_of_text)
        if apart
        else None
    )
    source, held_out = (
        Source(
            f"{folder} ({split})",
            ShardWindows(folder, split, train.sequence_length, end),
            config.model.vocab_size,
        )
        for split in ("train", "validation")
    )
    batches = Batches(
        [source], PermutedOrder(len(source), config.seed), train.batch_size, apart=apart
    )
    sets = {folder.name: HeldOut(held_out, train.validation_sequences, apart=apart)}
    return RunData(batches, sets, tokenizer, {folder.name: folder.name})
