"""Lists the packages that each part needs beside torch. Only torch is imported to find out."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

TORCH, TRITON = "2.11", "3.4"
MEASURING = {"numpy": "1.26", "rich": "13"}
TRAINER = {
    **MEASURING,
    "safetensors": "0.5",
    "tokenizers": "0.20",
    "tomli-w": "1.0",
    "jinja2": "3.1",
}
MODULES = {"tomli-w": "tomli_w"}
"""The module of each wheel whose module has another name."""
OF_OTHERS = {
    "rich": ("markdown-it-py", "mdurl", "pygments"),
    "pytest": ("pluggy", "iniconfig"),
    "heavyball": ("opt-einsum",),
}
"""Packages that these wheels need, which may be missing where wheels are copied by hand."""

WHEELS = (
    "tomli-w",
    "heavyball",
    "opt-einsum",
    "pytorch_optimizer",
)
"""The wheels that `make gpu-wheels` collects: those that are missing on a machine which has torch,
Triton, numpy, rich, safetensors, tokenizers, jinja2 and pytest."""


@dataclass(frozen=True)
class Missing:
    """A wheel that is not installed, or is too old."""

    wheel: str
    minimum: str
    present: str | None
    """The version that is installed; None: the wheel is missing."""

    def __str__(self) -> str:
        also = OF_OTHERS.get(self.wheel, ())
        state = "is missing" if self.present is None else f"is {self.present}"
        return f"{self.wheel} >= {self.minimum} ({state}" + (
            f"; it needs {', '.join(also)})" if also else ")"
        )


def missing(wheels: Mapping[str, str]) -> list[Missing]:
    """Return those of {wheel: least version} that are missing or too old."""
    versions = {wheel: installed(wheel) for wheel in wheels}
    return [
        Missing(wheel, least, versions[wheel])
        for wheel, least in wheels.items()
        if not _is_enough(versions[wheel], least)
    ]


def installed(wheel: str) -> str | None:
    """Return the version of a wheel whose module can be imported, or None."""
    if importlib.util.find_spec(MODULES.get(wheel, wheel)) is None:
        return None
    try:
        return version(wheel)
    except PackageNotFoundError:  # a module that was not installed as a wheel is taken as it is
        return "unknown"


def _is_enough(present: str | None, least: str) -> bool:
    return present is not None and (present == "unknown" or numbers(present) >= numbers(least))


def numbers(text: str) -> tuple[int, ...]:
    """Read the leading whole numbers of a version: (2, 11, 0) of "2.11.0+cu130"."""
    return tuple(int(part) for part in re.match(r"\d*(?:\.\d+)*", text)[0].split(".") if part)  # type: ignore[index]


def describe(lacks: Iterable[Missing]) -> str:
    """Describe each wheel in a line, without repetitions."""
    return "\n".join(f"  {line}" for line in dict.fromkeys(map(str, lacks)))
