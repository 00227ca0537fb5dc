"""Opens the data sets of a run, makes one from `data.source` if necessary, and checks that they fit
each other and the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lather.data.batch_sizes import BatchSizes
from lather.data.batches import Batches, HeldOut, Source
from lather.data.config import DataConfig
from lather.data.dataset import DataSet
from lather.data.making import ShowLine, make_dataset
from lather.data.order import MixturePhase, Order
from lather.data.sequences import PackedDocuments, Sequences, Windows
from lather.data.sources import list_sources
from lather.data.token_columns import PAIRS
from lather.errors import DataError
from lather.hub import Address


def open_datasets(config: DataConfig, vocab_size: int, report: ShowLine) -> list[DataSet]:
    """Open the data sets to train on. `report` is called with a line before each operation that
    takes long.

    Raises DataError if one is missing or damaged, has another tokenizer than the first, or tokens
    outside the vocabulary.
    """
    datasets = [DataSet(Path(path)) for path in config.path]
    datasets = datasets or [_of_source(config, vocab_size, report)]
    first = next((dataset for dataset in datasets if dataset.tokenizer), datasets[0])
    for dataset in datasets:
        _check(dataset, first, vocab_size)
    return datasets


def folder_of_source(config: DataConfig, vocab_size: int) -> Path:
    """Return the folder of the data set of `data.source` for the present names, sizes and times of
    its files, or for its commit on a hub. Raises DataError if there are no such files."""
    recipe = config.recipe(vocab_size)
    if config.revision:
        (listing,) = recipe.sources
        name = Address.parse(listing, "dataset").name.replace("/", "-")
    else:
        try:
            listing = list_sources(recipe).digest
        except DataError as error:
            raise DataError(f"data.source = {config.source!r}: {error}") from None
        name = Path(config.source).resolve().name
    return Path(config.cache_dir) / f"{name}-{vocab_size}-{recipe.digest(listing)}"


def _of_source(config: DataConfig, vocab_size: int, report: ShowLine) -> DataSet:
    """Open or make the data set of `data.source`."""
    folder = folder_of_source(config, vocab_size)
    if folder.exists():
        dataset = DataSet(folder)
    else:
        dataset = make_dataset(folder, config.recipe(vocab_size), report)
        if set(dataset.manifest.skipped) - {"empty"}:
            report(f"not taken: {dataset.skipped_in_words}")
    if "validation" not in dataset.manifest.splits:
        raise DataError(
            f"data.source = {config.source!r}: {dataset.manifest.splits['train'].documents} "
            f"document matches data.pattern = {config.resolved_pattern!r}, but at least 2 are "
            "needed (one is held out): give another folder or pattern"
        )
    return dataset


def _check(dataset: DataSet, first: DataSet, vocab_size: int) -> None:
    manifest, tokenizer = dataset.manifest, first.manifest.tokenizer_sha256
    if manifest.vocab_size > vocab_size:
        raise DataError(
            f"{dataset.folder} has a vocabulary of {manifest.vocab_size} tokens, but "
            f"model.vocab_size is {vocab_size}: give model.vocab_size {manifest.vocab_size} or "
            "more, or another data set"
        )
    if tokenizer and manifest.tokenizer_sha256 not in ("", tokenizer):
        raise DataError(
            f"{dataset.folder} was made with another tokenizer than {first.folder}: make one of "
            "them again with the other's tokenizer.json"
        )


def training_batches(
    datasets: Sequence[DataSet],
    config: DataConfig,
    length: int,
    sizes: BatchSizes,
    seed: int,
    phases: Sequence[MixturePhase] = (),
) -> Batches:
    """Return the training batches, of sequences of `length` tokens. `phases`: the mixtures of the
    run, if its weights have changed; none: the configured mixture."""
    sources = [open_source(dataset, "train", config, length) for dataset in datasets]
    phases = phases or [MixturePhase(0, config.weights)]
    return Batches(sources, Order([len(source) for source in sources], seed, phases), sizes)


def check_pairs(datasets: Sequence[DataSet], config: DataConfig, dpo_beta: float) -> None:
    """Raise DataError if a data set from which DPO would take sequences has no pairs of answers."""
    weights = config.weights or (1.0,) * len(datasets)
    for dataset, weight in zip(datasets, weights, strict=True):
        if weight and PAIRS not in dataset.split("train").columns:
            raise DataError(
                f"train.dpo_beta = {dpo_beta}, but {dataset.folder} has no pairs of answers, so "
                "that nothing of it would be trained: make it of rows with chosen and rejected, "
                "leave it out or give it weight 0 in data.weights, or set 0"
            )


def held_out_sets(
    datasets: Sequence[DataSet], config: DataConfig, length: int, most: int, vocab_size: int
) -> dict[str, HeldOut]:
    """Return, by name, up to `most` held-out sequences of each of the data sets that `evaluated`
    names.

    Raises DataError if one of `data.validation` is missing or does not fit.
    """
    sets = {}
    for name, dataset in evaluated(datasets, config).items():
        _check(dataset, datasets[0], vocab_size)
        source = open_source(dataset, dataset.held_out_split, config, length)
        sets[name] = HeldOut(source, most)
    return sets


def evaluated(datasets: Sequence[DataSet], config: DataConfig) -> dict[str, DataSet]:
    """Name the data sets that a run is evaluated on: its training data sets that have a validation
    split, and `data.validation`."""
    sets: dict[str, DataSet] = {}
    for dataset in datasets:
        if dataset.held_out_split == "validation":
            name = dataset.folder.name
            sets[str(dataset.folder) if name in sets else name] = dataset
    return sets | {name: DataSet(Path(folder)) for name, folder in config.validation.items()}


def open_source(dataset: DataSet, split: str, config: DataConfig, length: int) -> Source:
    """Open a split as sequences of `length` tokens, packed as configured. Raises DataError if there
    is no such split, or no sequence."""
    reader = dataset.split(split)
    if PAIRS in reader.columns and config.packing != "documents":
        raise DataError(
            f"{dataset.folder} has pairs of answers, which only data.packing = 'documents' keeps "
            "together: set it"
        )
    sequences: Sequences
    if config.packing == "documents":
        sequences = PackedDocuments(reader, length)
    else:
        sequences = Windows(reader, length, is_per_document=config.packed_attention)
    return Source(f"{dataset.folder} ({split})", sequences, dataset.manifest.vocab_size)
