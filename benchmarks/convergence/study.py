"""Reads a study from its file (which optimizers are trained on which models, at which rates, with
which seeds) and says which runs are left to make.

    name = "short"
    seeds = [1, 2, 3]                       # of the runs that are compared

    [config]                                # what `lather train` takes from a file, for all runs
    [settings.NAME]                         # a model, a batch, a length: further keys of the same
                                            kind
    [contestants.NAME]
    optim = { name = "muon", momentum = 0.9 }         # [optim] without rates
    train = { weight_dtype = "bfloat16" }             # may be left out: keys of [train]
    weights = "average"                               # "raw" if left out; "average": the losses are
                                                      those of the run's averaged weights
    scales = "tensor"                                 # "block" if left out; others are controls of
                                                      train.fp8: see `fp8_controls`
    rates = { small = [1e-2, 2e-2], large = [...] }   # of matrices, of the rest, in the settings in
                                                      which it takes part

    [tuning]                                # if this section is there, the search for rates begins
                                            at `rates`
    seed = 0
    factor = 2.0

The search makes a run at the start and at its four neighbors, which have one of the two rates
multiplied or divided by `factor`. It goes on around the best run so far, until that run is better
than its four neighbors. So the best rates are never at an edge of what was tried. The compared
runs have the best rates, and other seeds. Which runs are left follows from the study and its rows
alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.convergence.fp8_controls import BLOCK_SCALES, CONTROLS
from lather.config.config import Config
from lather.config.toml_file import config_from_mapping
from lather.errors import ConfigError, require
from lather.files import read_text

Rates = tuple[float, float]
"""Peak learning rates: of the matrices, and of all other parameters."""
Row = dict[str, Any]
MOST_HALVINGS = 8
"""How often the search divides both start rates by `factor` and tries again if the run diverges."""


@dataclass(frozen=True)
class Trial:
    """A training run of a study."""

    setting: str
    contestant: str
    seed: int
    rates: Rates
    mapping: dict[str, Any] = field(repr=False)
    """The configuration as `lather train` reads it from a file, without `run_dir`."""
    scales: str = BLOCK_SCALES
    """The scales of experts in FP8: "block", or the name of a control."""

    @property
    def key(self) -> str:
        """A name made of everything that determines the numbers of the run."""
        control = {} if self.scales == BLOCK_SCALES else {"scales": self.scales}
        text = json.dumps({**self.mapping, **control}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def config(self, run_dir: Path) -> Config:
        """Make the configuration; raises ConfigError."""
        return config_from_mapping({**self.mapping, "run_dir": str(run_dir)})


@dataclass(frozen=True)
class StudyContestant:
    """An optimizer with its options and rates."""

    name: str
    optim: dict[str, Any]
    rates: dict[str, Rates]
    """Rates (of matrices, of the rest) by setting, for the settings that it takes part in."""
    train: dict[str, Any]
    """Further keys of [train]."""
    weights: str
    """Weights whose losses are compared: "raw", or "average" (`train.average_timescale`)."""
    scales: str
    """The scales of experts in FP8: "block", or the name of a control."""

    def judged(self, row: Row) -> Row:
        """Return the row of a run with the losses that count for this contestant."""
        if self.weights == "raw" or row["final"] is None:
            return row
        final = row["average_validation"][-1][1]
        return {**row, "validation": row["average_validation"], "final": final}


@dataclass(frozen=True)
class Tuning:
    """How the rates are searched."""

    seed: int
    factor: float


@dataclass(frozen=True)
class Study:
    """The contents of a study file."""

    name: str
    seeds: tuple[int, ...]
    settings: dict[str, dict[str, Any]]
    """Configurations as `lather train` reads them from a file, by name of the setting."""
    contestants: tuple[StudyContestant, ...]
    tuning: Tuning | None

    def trial(self, contestant: StudyContestant, setting: str, seed: int, rates: Rates) -> Trial:
        lr, rest = (float(f"{rate:.9g}") for rate in rates)
        optim = _merged(contestant.optim, {"lr": lr, "rest": {"lr": rest}})
        own = {"optim": optim, "train": contestant.train, "seed": seed}
        mapping = _merged(self.settings[setting], own)
        return Trial(setting, contestant.name, seed, (lr, rest), mapping, contestant.scales)

    def pairs(self) -> Iterator[tuple[str, StudyContestant]]:
        """Yield every setting with each contestant that takes part in it."""
        for setting in self.settings:
            for contestant in self.contestants:
                if setting in contestant.rates:
                    yield setting, contestant

    def best_rates(
        self, contestant: StudyContestant, setting: str, rows: Mapping[str, Row]
    ) -> Rates | None:
        """Return the rates for the compared runs; None while they are still searched."""
        if self.tuning is None:
            return contestant.rates[setting]
        best, missing = self.search(contestant, setting, rows)
        return None if missing else best

    def wanted(self, rows: Mapping[str, Row]) -> list[Trial]:
        """Return the runs that can be started now, in order, after the finished `rows` by key. If
        there are none, the study is done."""
        runs = [
            trial
            for setting, contestant in self.pairs()
            for trial in self._wanted_of(contestant, setting, rows)
        ]
        unique: dict[str, Trial] = {}
        for trial in runs:
            if trial.key not in rows:
                unique.setdefault(trial.key, trial)
        return list(unique.values())

    def compared(self, rows: Mapping[str, Row]) -> list[Row]:
        """Return the rows of the compared runs whose rates are known by now."""
        compared: list[Row] = []
        for setting, contestant in self.pairs():
            rates = self.best_rates(contestant, setting, rows)
            if rates is not None:
                keys = [self.trial(contestant, setting, seed, rates).key for seed in self.seeds]
                compared += [
                    contestant.judged({**rows[key], "setting": setting})
                    | {"contestant": contestant.name}
                    for key in keys
                    if key in rows
                ]
        return compared

    def _wanted_of(
        self, contestant: StudyContestant, setting: str, rows: Mapping[str, Row]
    ) -> list[Trial]:
        if self.tuning is not None:
            best, missing = self.search(contestant, setting, rows)
            if missing:
                return missing
        else:
            best = contestant.rates[setting]
        return [self.trial(contestant, setting, seed, best) for seed in self.seeds]

    def search(
        self, contestant: StudyContestant, setting: str, rows: Mapping[str, Row]
    ) -> tuple[Rates, list[Trial]]:
        """Return the best rates so far, and the runs that are needed before they can be judged."""
        assert self.tuning is not None
        lr, rest = contestant.rates[setting]
        factor, seed = self.tuning.factor, self.tuning.seed

        def trial_at(point: tuple[int, int]) -> Trial:
            return self.trial(
                contestant, setting, seed, (lr * factor ** point[0], rest * factor ** point[1])
            )

        losses: dict[tuple[int, int], float] = {}
        around = {(0, 0)}
        while True:
            missing = [
                trial for point in sorted(around) if (trial := trial_at(point)).key not in rows
            ]
            losses |= {
                point: final_loss(contestant.judged(rows[trial.key]))
                for point in around
                if (trial := trial_at(point)).key in rows
            }
            if not losses:
                return (lr, rest), missing
            best = min(losses, key=lambda point: losses[point])
            if missing:
                return trial_at(best).rates, missing
            x, y = best
            if math.isfinite(losses[best]):
                around = {(x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)} - losses.keys()
            else:  # every run diverged so far
                around = {(-len(losses), -len(losses))} if len(losses) <= MOST_HALVINGS else set()
            if not around:
                return trial_at(best).rates, []


def final_loss(row: Row) -> float:
    """Return the validation loss at the end; infinite for a run that diverged."""
    return math.inf if row["final"] is None else float(row["final"])


def rows_by_key(rows: Iterable[Row]) -> dict[str, Row]:
    return {row["key"]: row for row in rows}


def load_study(path: Path) -> Study:
    """Read a study file. Raises ConfigError, which names the file and the fault, if the file or the
    configuration of a run is wrong."""
    place = ""
    try:
        study = _study(tomllib.loads(read_text(path)))
        for setting, contestant in study.pairs():
            place = f"contestant {contestant.name!r} in setting {setting!r}: "
            trial = study.trial(contestant, setting, 0, contestant.rates[setting])
            train = trial.config(Path("unused")).train
            averaged = train.average_timescale > 0
            judged = "raw for runs without train.average_timescale"
            require(contestant.weights == "raw" or averaged, "weights", contestant.weights, judged)
            is_fitting = contestant.scales == BLOCK_SCALES or train.fp8 == "block"
            control = 'left out, or the contestant must have train.fp8 = "block"'
            require(is_fitting, "scales", contestant.scales, control)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}): give a study file such as "
            "benchmarks/studies/short.toml"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except (UnicodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {place}{error}") from None
    return study


def _study(mapping: dict[str, Any]) -> Study:
    _check_keys(mapping, "", ("name", "settings", "contestants"), ("seeds", "config", "tuning"))
    common = mapping.get("config", {})
    settings = {name: _merged(common, values) for name, values in mapping["settings"].items()}
    contestants = []
    for name, values in mapping["contestants"].items():
        prefix = f"contestants.{name}."
        _check_keys(values, prefix, ("optim", "rates"), ("train", "weights", "scales"))
        for setting in values["rates"]:
            allowed = f"for the settings {', '.join(settings)}"
            require(setting in settings, f"{prefix}rates", setting, allowed)
        rates = {
            setting: _rates(pair, f"{prefix}rates.{setting}")
            for setting, pair in values["rates"].items()
        }
        weights = values.get("weights", "raw")
        require(weights in ("raw", "average"), f"{prefix}weights", weights, "raw or average")
        scales = values.get("scales", BLOCK_SCALES)
        known = (BLOCK_SCALES, *CONTROLS)
        require(scales in known, f"{prefix}scales", scales, f"one of {', '.join(known)}")
        train = values.get("train", {})
        contestants.append(StudyContestant(name, values["optim"], rates, train, weights, scales))
    tuning, seeds = None, mapping.get("seeds", [])
    if "tuning" in mapping:
        _check_keys(mapping["tuning"], "tuning.", ("seed", "factor"))
        tuning = Tuning(mapping["tuning"]["seed"], float(mapping["tuning"]["factor"]))
        require(tuning.factor > 1, "tuning.factor", tuning.factor, "above 1")
        disjoint = "other than tuning.seed: rates that were chosen on a seed are not judged on it"
        require(tuning.seed not in seeds, "seeds", seeds, disjoint)
    either = "a list with at least one seed, or there must be a [tuning]"
    require(bool(seeds) or tuning is not None, "seeds", seeds, either)
    return Study(mapping["name"], tuple(seeds), settings, tuple(contestants), tuning)


def _check_keys(
    mapping: dict[str, Any], prefix: str, required: Sequence[str], optional: Sequence[str] = ()
) -> None:
    known = (*required, *optional)
    for key in required:
        require(key in mapping, f"{prefix}{key}", None, "given")
    for key, value in mapping.items():
        require(key in known, prefix + key, value, f"left out: known keys are {', '.join(known)}")


def _rates(pair: Any, name: str) -> Rates:
    fits = (
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(rate, int | float) and rate > 0 for rate in pair)
    )
    require(fits, name, pair, "two rates above 0: of the matrices, of the rest")
    return float(pair[0]), float(pair[1])


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above`, section by section."""
    both = {
        key: _merged(below[key], above[key])
        for key in below.keys() & above.keys()
        if isinstance(above[key], Mapping)
    }
    return {**below, **above, **both}
