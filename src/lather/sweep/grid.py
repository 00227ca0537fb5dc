"""The runs of a sweep: every combination of the values that are varied, with every seed."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lather.config.config import Config
from lather.config.fields import fields_of, merged, section_at
from lather.config.toml_file import values_of_config
from lather.errors import ConfigError
from lather.files import digest_of

Values = Mapping[str, str]
"""Value of each varied field by its dotted name, as it is written on a command line."""
LEFT_OUT = {
    "seed": "give --seeds N, and --seed for the first of them",
    "run_dir": "each run has a folder of its own in --out",
}
"""Fields that are not varied, and what to do."""
LONGEST_KEY = 100
VALUE = r"""(?:[^,'"\\]|'[^']*'|"(?:[^"\\]|\\.)*"|\\.)*"""
"""A value in a list with commas: a comma within quotes, as a shell has them, is part of it."""


@dataclass(frozen=True)
class GridRun:
    """A run of a sweep."""

    values: Values
    config: Config
    """The configuration with the seed; `run_dir` has no meaning in it."""

    @property
    def key(self) -> str:
        """The name of its folder: all values and the seed."""
        return folder_name(self.values, f"seed-{self.config.seed}")

    @property
    def text(self) -> str:
        """The values and the seed, for messages."""
        return f"{words_for(self.values)} seed={self.config.seed}".strip()


def folder_name(values: Values, end: str) -> str:
    """Return a name for a folder that tells all values, `lr-0.01_name-muon_END`."""
    names = short_names(values)
    whole = "_".join([*(f"{names[name]}-{value}" for name, value in sorted(values.items())), end])
    plain = re.sub(r"[^\w.+-]+", "-", whole, flags=re.ASCII)[:LONGEST_KEY]
    return plain if plain == whole else f"{plain}-{digest_of(whole)[:8]}"


def words_for(values: Values) -> str:
    """Return `optim.lr=0.01 optim.name=muon`, for messages."""
    return " ".join(map("=".join, values.items()))


def short_names(names: Sequence[str] | Values) -> dict[str, str]:
    """Return the last parts of dotted names, as many as tell each from the others."""
    short = {}
    for name in names:
        parts = name.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
        others = [f".{other}" for other in names if other != name]
        unique = (end for end in ends if not any(other.endswith(f".{end}") for other in others))
        short[name] = next(unique, name)
    return short


def read_varied(texts: Sequence[str]) -> dict[str, list[str]]:
    """Read `FIELD=VALUE,VALUE` texts. Raises ConfigError for one that is not of this form, for a
    field that is given twice, and for one that a sweep does not vary."""
    varied: dict[str, list[str]] = {}
    for text in texts:
        name, equals, rest = text.removeprefix("--").partition("=")
        if not re.fullmatch(f"{VALUE}(,{VALUE})*", rest, re.DOTALL):
            raise ConfigError(
                f"--vary {text}: a quote is not closed: close it, or write an apostrophe within "
                'double quotes, such as "it\'s"'
            )
        values = [value.strip() for value in re.findall(f"(?:^|,)({VALUE})", rest, re.DOTALL)]
        name = name.replace("-", "_")
        if not (name and equals and all(values)):
            raise ConfigError(
                f"--vary {text}: give a field and its values, such as --vary optim.lr=5e-3,1e-2"
            )
        if name in varied:
            raise ConfigError(
                f"--vary {name} is given twice: give all values at once, "
                f"--vary {name}={','.join([*varied[name], *values])}"
            )
        if name in LEFT_OUT:
            raise ConfigError(f"--vary {name}: a sweep does not vary it: {LEFT_OUT[name]}")
        varied[name] = values
    return varied


def grid(
    varied: Mapping[str, Sequence[str]],
    num_seeds: int,
    configure: Callable[[Values], Config],
) -> list[GridRun]:
    """Return the runs of a grid, all combinations with the first seed first. `configure` makes the
    configuration of a combination, with the first seed.

    Raises ConfigError if two values of a field are the same.
    """
    written: dict[str, Values] = {}
    combinations = []
    for chosen in itertools.product(*varied.values()):
        values = dict(zip(varied, chosen, strict=True))
        config = configure(values)
        same = {name: text_of(value_of(config, name)) for name in values}
        if (other := written.setdefault(str(same), values)) is not values:
            name = next((name for name in values if values[name] != other[name]), next(iter(same)))
            raise ConfigError(
                f"--vary {name}: {other[name]} and {values[name]} are the same value: leave one of "
                "them out"
            )
        combinations.append(GridRun(same, config))
    return [
        replace(run, config=replace(run.config, seed=run.config.seed + number))
        for number in range(num_seeds)
        for run in combinations
    ]


def value_of(config: Config, name: str) -> Any:
    """Return the value of a field by its dotted name; None if it is left out."""
    value: Any = values_of_config(config)
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def text_of(value: Any) -> str:
    """Write a value as a command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    if isinstance(value, Mapping):
        return " ".join(f"{shlex.quote(name)} {text_of(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(text_of, value))
    return shlex.quote(value) if isinstance(value, str) else str(value)


def words_of(values: Values, base: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command line that give these values to fields of a configuration with
    the values `base`."""
    whole = merged(base, values)
    for name, text in values.items():
        flag = f"--{name.replace('_', '-')}"
        if text in ("true", "false") and _is_switch(name, whole):
            section, dot, last = flag.rpartition(".")
            yield flag if text == "true" else f"{section}{dot}no-{last}"
        else:
            yield from (flag, *shlex.split(text))


def _is_switch(name: str, values: Mapping[str, Any]) -> bool:
    section, _, key = name.rpartition(".")
    cls = section_at(Config, section, values) if section else Config
    field = fields_of(cls).get(key) if cls is not None else None
    return field is not None and field.hint is bool
