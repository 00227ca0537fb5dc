"""The run directory: its files, its lock, and the records of configuration and data.

config.toml        resolved configuration               metrics.jsonl   a row per step
provenance.json    versions, data sets, starts          loss.png        picture of the losses
tokenizer.json     tokenizer of the data set            checkpoints/    complete checkpoints only
huggingface/       companion files of the tokenizer     changes.jsonl   history of changes
memory.json        planned and measured bytes           sample.txt      text generated at the end
timeline.jsonl     actions of each rank over time       report.html     page of the whole run
profile/           traces and times of profiled steps   spikes.jsonl    rows of steps left behind
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lather
from lather.config.changes import CHANGES
from lather.config.config import Config
from lather.config.run_folder import PROVENANCE
from lather.config.toml_file import config_to_toml, folder_of
from lather.data.batches import Batches, HeldOut
from lather.data.documents import load_tokenizer
from lather.data.opening import check_pairs, held_out_sets, open_datasets, training_batches
from lather.data.order import MixturePhase
from lather.errors import DataError, RunError, UserError
from lather.files import LOCK, lock_folder, read_text, write_aside
from lather.parallel.agreement import broadcast, errors_on_all_ranks
from lather.parallel.mesh import Mesh
from lather.train.companions import save_companions
from lather.train.initial_weights import check_same_tokenizer
from lather.train.start import Start, copy_run, fork_source, remove_run, start_of
from lather.version import find_commit


class RunDirectory:
    """A run directory, opened and locked until `close` or the end of the process."""

    def __init__(self, config: Config) -> None:
        """Create a run, fork it from `config.fork_from`, or open the existing one.

        An existing run is not changed before `record`. Raises RunError if the folder is not
        writable, is in use, holds something else, or if a fixed field of the configuration has
        changed.
        """
        path, self._config = Path(config.run_dir), config
        self.path = path
        self._made_folder, self._is_new = not path.exists(), False
        self._lock = lock_folder(path, f"run_dir = {str(path)!r}", "--run-dir")
        try:
            source = fork_source(path, config)
            if source is not None:
                self._is_new = True
                copy_run(*source, path)
            self.start = start_of(path, config)
            if self.start.is_new:
                self._is_new = True
                write_aside(path / "config.toml", config_to_toml(self.start.config))
        except UserError:
            self.abandon()
            self.close()
            raise

    def set_steps(self, steps: int) -> None:
        """Start with this number of steps, that of `train.epochs`. Raises RunError as the
        construction does."""
        self.start = start_of(self.path, self._config, steps)

    def check_data(self, data: RunData) -> None:
        """Raise RunError if the run has trained on other data sets than the first of these."""
        record = self._record()
        if record is None:
            return
        trained = data_sets_of(record)[: self.start.num_data_sets]
        if [*data.identities.values()][: len(trained)] != [identity for _, identity in trained]:
            raise RunError(
                f"run_dir = {str(self.path)!r} was trained on other tokens "
                f"({', '.join(folder for folder, _ in trained)}) than it has "
                f"now ({', '.join(data.identities)}): restore the text, or give another --run-dir; "
                "added data sets come after the first "
                "ones in data.path, and a weight of 0 leaves one out"
            )

    def record(self, data: RunData, hardware: Mapping[str, str] | None = None) -> None:
        """Record the configuration, its changes, the data sets and their tokenizer, as they are
        from now on, and this start: its step, versions, machine, and `hardware`, texts such as its
        ranks.

        History and configuration are replaced by one atomic write, so that a start that is killed
        here does not change what the next start reads. Raises RunError, before anything is written,
        as `check_data` does.
        """
        self.check_data(data)
        if data.tokenizer is not None:
            write_aside(self.path / "tokenizer.json", data.tokenizer.read_bytes())
        if self.start.is_finished:
            return
        if self.start.history.rows or (self.path / CHANGES).exists():
            write_aside(self.path / CHANGES, self.start.history.to_jsonl())
        write_aside(self.path / "config.toml", config_to_toml(self.start.config))
        record = self._record()
        if record is None:
            save_companions(self.path, self.start.config)
            record = {"data": [], **provenance(), "starts": []}
        record["data"] = list(data.identities.items())
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        start = {"time": now, "step": self.start.step, **provenance(), **(hardware or {})}
        # the steps of starts at or after this step were lost
        earlier = [row for row in record["starts"] if row["step"] < self.start.step]
        record["starts"] = [*earlier, start]
        write_aside(self.path / PROVENANCE, json.dumps(record, indent=1))

    def _record(self) -> dict[str, Any] | None:
        """Read the record of versions and data sets; None for a new run."""
        file = self.path / PROVENANCE
        if not file.exists():
            return None
        try:
            record = json.loads(read_text(file))
            return {**record, "data": [*record["data"]], "starts": [*record["starts"]]}
        except (ValueError, KeyError, TypeError):
            raise RunError(
                f"{file}: damaged: restore it from a backup, or delete it: the run then goes on "
                "without a check that its data are those of before"
            ) from None

    def check_in_place(self) -> None:
        """Raise RunError if the folder was deleted, moved or replaced: another process may train in
        its place."""
        try:
            at_path = os.stat(self.path / LOCK)
            is_in_place = os.path.samestat(os.fstat(self._lock.fileno()), at_path)
        except FileNotFoundError:  # no other process has begun here since
            is_in_place = (self.path / "config.toml").exists()
        if is_in_place:
            return
        raise RunError(
            f"run_dir = {str(self.path)!r} was deleted or moved while this process trained there: "
            "nothing more is saved; start again"
        )

    def abandon(self) -> None:
        """Remove the files of a run that could not start; a run that existed before is not
        changed."""
        if self._is_new:
            remove_run(self.path)
        if not (self.path / "config.toml").exists():
            (self.path / LOCK).unlink(missing_ok=True)
            if self._made_folder:
                with contextlib.suppress(OSError):
                    self.path.rmdir()

    def close(self) -> None:
        self._lock.close()


@dataclass(frozen=True)
class RunData:
    """Batches to train on, and held-out sequences to evaluate on."""

    batches: Batches
    held_out: dict[str, HeldOut]
    """Held-out sets by name; the loss of the first is the run's validation loss."""
    tokenizer: Path | None
    identities: dict[str, str]
    """Identity of each data set, by its folder."""


def open_run_data(
    config: Config, report: Callable[[str], None], phases: Sequence[MixturePhase] = ()
) -> RunData:
    """Open the data sets that the configuration names; those that do not exist yet are made.
    `phases`: the data mixtures that the run has had; empty: a single mixture.

    Raises DataError if a data set or its tokenizer is missing or damaged.
    """
    train, vocab_size = config.train, config.model.vocab_size
    datasets = open_datasets(config.data, vocab_size, report)
    if train.dpo_beta:
        check_pairs(datasets, config.data, train.dpo_beta)
    batches = training_batches(
        datasets, config.data, train.sequence_length, train.batch_sizes, config.seed, phases
    )
    held_out = held_out_sets(
        datasets, config.data, train.sequence_length, train.validation_sequences, vocab_size
    )
    tokenizer = next((dataset.tokenizer for dataset in datasets if dataset.tokenizer), None)
    if tokenizer is not None:
        load_tokenizer(tokenizer, f"delete {tokenizer.parent} to make the data set again")
    identities = {str(dataset.folder): dataset.manifest.identity for dataset in datasets}
    return RunData(batches, held_out, tokenizer, identities)


def open_on_all_ranks(
    start: Start,
    mesh: Mesh,
    report: Callable[[str], None],
    run_dir: RunDirectory | None,
    weights: Path | None,
) -> RunData:
    """Open the data sets of a start: first on rank 0, which may have to tokenize text, then on the
    others, which check that they have the same. Only rank 0 has `run_dir`; `weights`: initial ones.

    Raises DataError or RunError, on all ranks, if a data set or a tokenizer does not fit.
    """
    config, phases = start.config, start.history.phases(start.config.train.batch_sizes)
    data: RunData | None = None
    with errors_on_all_ranks(mesh.control_group):
        if run_dir is not None:
            data = open_run_data(config, report, phases)
            if weights is not None and data.tokenizer is not None:
                source, is_given = folder_of(config.init_from), bool(config.data.path)
                check_same_tokenizer(source, data.tokenizer, is_given=is_given)
            run_dir.check_data(data)
    identities = broadcast({} if data is None else data.identities, mesh.control_group)
    with errors_on_all_ranks(mesh.control_group):
        data = data or open_run_data(config, report, phases)
        if list(data.identities.values()) != list(identities.values()):
            raise DataError(
                f"the data sets on {platform.node()} ({', '.join(data.identities)}) are not those "
                f"of rank 0 ({', '.join(identities)}): give all ranks the same ones, as copies or "
                "on a shared file system"
            )
    return data


def with_epochs(
    start: Start,
    data: RunData,
    mesh: Mesh,
    report: Callable[[str], None],
    run_dir: RunDirectory | None,
) -> Start:
    """Return the start with the steps of `train.epochs`, if that is given, the same on all ranks.
    Only rank 0 has `run_dir`."""
    loop = start.config.train
    if not loop.epochs:
        return start
    size = data.batches.order.epoch_size
    steps = loop.steps_of_epochs(size)
    passes = "1 epoch" if loop.epochs == 1 else f"{loop.epochs:g} epochs"
    report(f"{passes} of {size:,} sequences: train.steps = {steps:,}")
    with errors_on_all_ranks(mesh.control_group):
        if run_dir is not None:
            run_dir.set_steps(steps)
            start = run_dir.start
    return broadcast(start, mesh.control_group)


def data_sets_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return folder and identity of each data set in a provenance.json."""
    return [(str(folder), str(identity)) for folder, identity in record["data"]]


def provenance() -> dict[str, Any]:
    """Return versions and hardware on which the numbers of a run may depend besides its
    configuration."""
    return {
        "lather": lather.__version__,
        "commit": find_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
