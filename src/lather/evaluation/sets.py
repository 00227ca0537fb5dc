"""The held-out sets that a model is evaluated on: given data sets, or the run's own validation
sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from lather.data.batches import HeldOut, Source
from lather.data.dataset import DataSet
from lather.data.documents import load_tokenizer
from lather.data.opening import evaluated, open_source
from lather.data.token_columns import PAIRS
from lather.errors import DataError, UserError
from lather.files import read_text
from lather.train.run_dir import data_sets_of
from lather.train.trained_model import TrainedModel


@dataclass(frozen=True)
class HeldOutSet:
    """A split of a data set, cut into sequences."""

    name: str
    folder: Path
    split: str
    source: Source
    tokenizer: Tokenizer | None

    def indices(self, most: int) -> Sequence[int]:
        """Choose up to `most` sequences, spread evenly as in validation during training; 0: all of
        them."""
        number = len(self.source)
        return HeldOut(self.source, most).indices if 0 < most < number else range(number)


def open_sets(
    trained: TrainedModel, named: Sequence[str], split: str, length: int
) -> list[HeldOutSet]:
    """Open the sets of `named`, each NAME=FOLDER or FOLDER, or the run's own if `named` is empty,
    in sequences of `length` tokens. Pairs of answers are packed by documents, whatever the run's
    `data.packing`.

    An empty `split` means "validation", or "train" for a data set without it. Raises DataError if a
    data set is missing or damaged, has another tokenizer than the run, or has tokens outside the
    model's vocabulary; UserError if two sets have the same name."""
    sets = []
    for name, dataset in (_named(named) if named else _of_run(trained)).items():
        tokenizer = _checked_tokenizer(dataset, trained)
        chosen = split or dataset.held_out_split
        data = trained.config.data
        if PAIRS in dataset.split(chosen).columns:
            data = replace(data, packing="documents")
        source = open_source(dataset, chosen, data, length)
        sets.append(HeldOutSet(name, dataset.folder, chosen, source, tokenizer))
    return sets


def _named(named: Sequence[str]) -> dict[str, DataSet]:
    folders: dict[str, Path] = {}
    for text in named:
        name, equals, folder = text.partition("=")
        if not equals or Path(text).is_dir():
            name, folder = Path(text).resolve().name, text
        if not name or not folder:
            raise UserError(f"{text!r} names no data set: give FOLDER or NAME=FOLDER")
        if name in folders:
            raise UserError(
                f"two data sets are called {name!r}: {folders[name]} and {folder}: give one of "
                "them as NAME=FOLDER"
            )
        folders[name] = Path(folder)
    return {name: DataSet(folder) for name, folder in folders.items()}


def _of_run(trained: TrainedModel) -> dict[str, DataSet]:
    """Return the data sets that the run was validated on."""
    data = trained.config.data
    sets = evaluated([DataSet(Path(folder)) for folder in data.path or _recorded(trained)], data)
    if not sets:
        raise UserError(
            f"{trained.run} has no held-out set: name data sets, as in lather eval {trained.run} "
            "FOLDER"
        )
    return sets


def _recorded(trained: TrainedModel) -> list[str]:
    """Return the data sets that were made from `data.source` when the run started. Those that are
    not where they were then are in `data.cache_dir`."""
    cache = Path(trained.config.data.cache_dir)
    try:
        record = json.loads(read_text(trained.run / "provenance.json"))
        folders = [Path(folder) for folder, _ in data_sets_of(record)]
        return [
            str(folder if folder.exists() or not moved.exists() else moved)
            for folder in folders
            for moved in [cache / folder.name]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{trained.run}: it does not record its training data sets (it was imported, or is a "
            f"Hugging Face folder): name data sets, as in lather eval {trained.run} FOLDER"
        ) from None


def _checked_tokenizer(dataset: DataSet, trained: TrainedModel) -> Tokenizer | None:
    """Load the data set's tokenizer, if it has one. Raises DataError if the model has another
    tokenizer or a smaller vocabulary."""
    vocab_size, file = trained.config.model.vocab_size, trained.run / "tokenizer.json"
    if dataset.manifest.vocab_size > vocab_size:
        raise DataError(
            f"{dataset.folder} has a vocabulary of {dataset.manifest.vocab_size} tokens, but the "
            f"model's is {vocab_size}: make it again with {file}"
        )
    if dataset.tokenizer is None:
        return None
    tokenizer = load_tokenizer(dataset.tokenizer, "restore it")
    if file.exists() and tokenizer.to_str() != trained.tokenizer().to_str():
        raise DataError(
            f"{dataset.folder} was made with another tokenizer than the run's: make it again with "
            f"{file}"
        )
    return tokenizer
