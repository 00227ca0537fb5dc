"""The folder of a sweep, in which its runs are listed:

sweep.json      the runs so far: values, seed, data   runs/KEY        the folder of a run
runs/KEY.toml   the configuration of a run            runs/KEY.log    what its process printed
sweep.png       picture of the results                best.toml       configuration of the best row
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w

from lather.config.changes import values_of
from lather.config.config import Config
from lather.config.toml_file import load_config, values_of_config
from lather.errors import RunError, as_toml
from lather.files import read_text, write_aside
from lather.formats import SWEEP
from lather.sweep.grid import GridRun, Values

LIST = "sweep.json"
MAY_CHANGE = ("run_dir", "checkpoint.", "log.", "train.minutes")
"""Fields, or beginnings of their names, that do not change the results of a run."""


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep."""

    path: Path

    def run_dir(self, run: GridRun) -> Path:
        return self.path / "runs" / run.key

    def log(self, run: GridRun) -> Path:
        return self.path / "runs" / f"{run.key}.log"

    def toml(self, run: GridRun) -> Path:
        return self.path / "runs" / f"{run.key}.toml"

    @property
    def best(self) -> Path:
        """The configuration of the best row."""
        return self.path / "best.toml"

    def runs(self, names: Sequence[str]) -> list[GridRun]:
        """Return the runs that the folder lists; none for a new folder. Raises RunError if they are
        not those of a sweep over the fields `names`, or if the folder holds something else."""
        file = self.path / LIST
        if not file.exists():
            if any(self.path.glob("[!.]*")) and not (self.path / "runs").is_dir():
                raise RunError(
                    f"{self.path} holds files but no {LIST}, so it is not a sweep: give another "
                    "--out"
                )
            return []
        theirs, each, _ = self._read()
        if set(theirs) != set(names):
            raise RunError(
                f"{self.path} is a sweep over {', '.join(theirs) or 'seeds'}, not over "
                f"{', '.join(names) or 'seeds'}: vary the same fields, or give another --out"
            )
        return [self._listed({name: values[name] for name in names}, seed) for values, seed in each]

    def _listed(self, values: Values, seed: int) -> GridRun:
        """Read the configuration of a run that is listed."""
        unread = GridRun(values, Config(seed=seed))
        return replace(unread, config=load_config(self.toml(unread)))

    def _read(self) -> tuple[list[str], list[tuple[Values, int]], dict[str, list[str]]]:
        """Return the fields that are varied, values and seed of each run, and `data`. Raises
        RunError if the list is damaged."""
        file = self.path / LIST
        try:
            listed = json.loads(read_text(file))
            SWEEP.check(listed["format"], file)
            names = list(listed["names"])
            runs: list[tuple[Values, int]] = [
                ({name: values[name] for name in names}, int(seed))
                for values, seed in listed["runs"]
            ]
            return names, runs, dict(listed.get("data", {}))
        except (ValueError, KeyError, TypeError):  # also if it is no JSON, or not UTF-8
            raise RunError(f"{file}: damaged: restore it, or give another --out") from None

    def data(self) -> dict[str, list[str]]:
        """Return the identities of the data sets of each run in the list, by its key. Runs that
        were listed before they were recorded have none."""
        return self._read()[2] if (self.path / LIST).exists() else {}

    def list_runs(self, runs: Sequence[GridRun], data: Mapping[str, Sequence[str]]) -> None:
        """Write the list of the runs, after their configurations, so that it can always be read.
        `data`: the identities of their data sets, by the key of the run."""
        (self.path / "runs").mkdir(parents=True, exist_ok=True)
        for run in runs:
            values = {**values_of_config(run.config)}
            del values["run_dir"]
            write_aside(self.toml(run), tomli_w.dumps(values))
        each = [[run.values, run.config.seed] for run in runs]
        names = list(runs[0].values)
        content = {"format": SWEEP.number, "names": names, "runs": each, "data": data}
        write_aside(self.path / LIST, json.dumps(content, indent=1))


def check_same(folder: Path, run: GridRun, config: Config) -> None:
    """Raise RunError if the configuration of a listed run is another than `config`, of today."""
    before, now = values_of(run.config), values_of(config)
    for name in {**before, **now}:
        if before.get(name) != now.get(name) and not name.startswith(MAY_CHANGE):
            raise RunError(
                f"{folder} was begun with another configuration: {name} is "
                f"{as_toml(before.get(name))} there and {as_toml(now.get(name))} here: give the "
                "same, or another --out"
            )


@dataclass(frozen=True)
class SweepData:
    """The data sets that runs take."""

    folders: tuple[str, ...]
    """Folders of the data sets to train on."""
    identities: list[str]
    """Identities of these data sets, then of those of `data.validation`."""


USES = ("weights", "packing", "packed_attention")
"""Fields of `[data]` that say how its data sets are used."""


def origin_of(config: Config) -> str:
    """Return what the data sets of a run are made from, to tell those of other runs from them."""
    made_from = {name: x for name, x in vars(config.data).items() if name not in USES}
    return str((made_from, config.model.vocab_size))


def check_same_data(
    folder: SweepFolder, listed: Sequence[GridRun], opened: Mapping[str, SweepData]
) -> None:
    """Raise RunError if a listed run has taken other texts than are there today. `opened`: the data
    sets of today by their origin; those of other origins are not looked at."""
    recorded = folder.data()
    for run in listed:
        now, before = opened.get(origin_of(run.config)), recorded.get(run.key)
        if now is not None and before is not None and before != now.identities:
            data = run.config.data
            each = [*(data.path or [data.source]), *data.validation.values()]
            places = ", ".join(dict.fromkeys(each))
            raise RunError(
                f"{folder.path} was begun with other texts than are in {places} now: restore them, "
                "or give another --out"
            )
