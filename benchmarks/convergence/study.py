"""Reads a study from its file (which optimizers are trained on which models, at which rates, with
which seeds) and says which runs are left to make.

    name = "short"
    seeds = [1, 2, 3]                       # of the runs that are compared

    [config]                                # what `lather train` takes from a file, for all runs
    [settings.NAME]                         # a model, a batch, a length: further keys of the same
                                            kind
    [contestants.NAME]
    optim = { name = "muon", momentum = 0.9 }         # [optim] without rates
    rates = { small = [1e-2, 2e-2], large = [...] }   # of matrices, of the rest, in the settings in
                                                      which it takes part

    [tuning]                                # if this section is there, the search for rates begins
                                            at `rates`
    seed = 0
    factor = 2.0

The search makes a run at the start and at its four neighbors, which have one of the two rates
multiplied or divided by `factor`. It goes on around the best run so far, until that one is better
than its four neighbors. So the best rates are never at an edge of what was tried. The compared
runs have the best rates, and seeds of their own. Which runs are left follows from the study and its
rows: nothing else is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
    """One training run of a study."""

    setting: str
    contestant: str
    seed: int
    rates: Rates
    mapping: dict[str, Any] = field(repr=False)
    """The configuration as `lather train` reads it from a file, without `run_dir`."""

    @property
    def key(self) -> str:
        """A name made of everything that determines the numbers of the run."""
        return hashlib.sha256(json.dumps(self.mapping, sort_keys=True).encode()).hexdigest()[:16]

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
        return Trial(
            setting,
            contestant.name,
            seed,
            (lr, rest),
            _merged(self.settings[setting], {"optim": optim, "seed": seed}),
        )

    def limited_to(self, settings: Sequence[str], contestants: Sequence[str]) -> Study:
        """The part of the study with these settings and contestants; empty: all. Raises ConfigError
        for an unknown name."""
        known = {
            "settings": list(self.settings),
            "contestants": [one.name for one in self.contestants],
        }
        for option, names in (("settings", settings), ("contestants", contestants)):
            for name in names:
                require(
                    name in known[option], f"--{option}", name, f"one of {', '.join(known[option])}"
                )
        kept = [
            replace(
                one,
                rates={
                    key: rates
                    for key, rates in one.rates.items()
                    if not settings or key in settings
                },
            )
            for one in self.contestants
            if not contestants or one.name in contestants
        ]
        return replace(self, contestants=tuple(kept))

    def pairs(self) -> Iterator[tuple[str, StudyContestant]]:
        """Every setting with each contestant that takes part in it."""
        for setting in self.settings:
            for contestant in self.contestants:
                if setting in contestant.rates:
                    yield setting, contestant

    def best_rates(
        self, contestant: StudyContestant, setting: str, rows: Mapping[str, Row]
    ) -> Rates | None:
        """The rates for the compared runs; None while they are still searched."""
        if self.tuning is None:
            return contestant.rates[setting]
        best, missing = self.search(contestant, setting, rows)
        return None if missing else best

    def wanted(self, rows: Mapping[str, Row]) -> list[Trial]:
        """The runs that can be started now, in order, given the finished rows by key. If there are
        none, the study is done."""
        runs = [
            trial
            for setting, contestant in self.pairs()
            for trial in self._wanted_of(contestant, setting, rows)
        ]
        unique = {trial.key: trial for trial in runs if trial.key not in rows}
        return list(unique.values())

    def compared(self, rows: Mapping[str, Row]) -> list[Row]:
        """The rows of the compared runs whose rates are known by now."""
        found = []
        for setting, contestant in self.pairs():
            rates = self.best_rates(contestant, setting, rows)
            if rates is not None:
                keys = [self.trial(contestant, setting, seed, rates).key for seed in self.seeds]
                found += [
                    {**rows[key], "setting": setting, "contestant": contestant.name}
                    for key in keys
                    if key in rows
                ]
        return found

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
        """The best rates so far, and the runs that are needed before those can be judged."""
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
                point: final_loss(rows[trial.key])
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
    """Validation loss at the end; infinite for a run that diverged."""
    return math.inf if row["final"] is None else float(row["final"])


def rows_by_key(rows: Iterable[Row]) -> dict[str, Row]:
    return {row["key"]: row for row in rows}


def load_study(path: Path) -> Study:
    """Read a study file. Raises ConfigError, which names the file and the fault, if the file or the
    configuration of a run is wrong."""
    try:
        mapping = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}): give a study file such as "
            "benchmarks/studies/short.toml"
        ) from None
    except UnicodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    try:
        study = _study(mapping)
        for setting, contestant in study.pairs():
            try:
                study.trial(contestant, setting, 0, contestant.rates[setting]).config(
                    Path("unused")
                )
            except ConfigError as error:
                raise ConfigError(
                    f"contestant {contestant.name!r} in setting {setting!r}: {error}"
                ) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return study


def _study(mapping: dict[str, Any]) -> Study:
    _check_keys(
        mapping,
        "",
        required=("name", "settings", "contestants"),
        optional=("seeds", "config", "tuning"),
    )
    common, settings = mapping.get("config", {}), mapping["settings"]
    merged = {name: _merged(common, own) for name, own in settings.items()}
    contestants = []
    for name, own in mapping["contestants"].items():
        prefix = f"contestants.{name}."
        _check_keys(own, prefix, required=("optim", "rates"), optional=())
        rates = {
            setting: _rates(pair, f"{prefix}rates.{setting}")
            for setting, pair in own["rates"].items()
        }
        for setting in rates:
            require(
                setting in merged,
                f"{prefix}rates",
                setting,
                f"for the settings {', '.join(merged)}",
            )
        contestants.append(StudyContestant(name, own["optim"], rates))
    tuning = None
    if "tuning" in mapping:
        _check_keys(mapping["tuning"], "tuning.", required=("seed", "factor"), optional=())
        require(
            mapping["tuning"]["factor"] > 1, "tuning.factor", mapping["tuning"]["factor"], "above 1"
        )
        tuning = Tuning(mapping["tuning"]["seed"], float(mapping["tuning"]["factor"]))
    seeds: Sequence[int] = mapping.get("seeds", [])
    require(
        bool(seeds) or tuning is not None,
        "seeds",
        seeds,
        "a list with at least one seed, or there must be a [tuning]",
    )
    overlap = tuning is not None and tuning.seed in seeds
    require(
        not overlap,
        "seeds",
        seeds,
        "other than tuning.seed: rates that were chosen on a seed are not judged on it",
    )
    return Study(mapping["name"], tuple(seeds), merged, tuple(contestants), tuning)


def _check_keys(
    mapping: Any, prefix: str, required: Sequence[str], optional: Sequence[str]
) -> None:
    require(isinstance(mapping, dict), prefix.rstrip(".") or "the study", mapping, "a section")
    for key in required:
        require(key in mapping, f"{prefix}{key}", None, "given")
    for key in mapping:
        require(
            key in (*required, *optional),
            prefix + key,
            mapping[key],
            f"left out: known keys are {', '.join((*required, *optional))}",
        )


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
