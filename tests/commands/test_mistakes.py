"""Mistakes that a user types or writes in TOML, and the lines that answer them: `mistakes.txt` is
reviewed like a page.

    PYTHONPATH=tests python tests/commands/test_mistakes.py

writes what is said now into the file; review the difference.

An entry is input and, indented, the line that Lather says. Input is lines of my.toml, which is
loaded, or a command that begins with `$`, after lines of my.toml that it reads. Commands run in a
folder as `prepare` makes it, and change nothing there."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from lather.cli import main
from lather.config.config import Config
from lather.config.fields import fields_of, merged, union_parts
from lather.config.optim import OptimConfig
from lather.config.toml_file import config_from_mapping, load_config
from lather.errors import ConfigError
from lather.models.families import FAMILIES
from tiny_run import write_config

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).with_name("mistakes.txt")
INDENT = "    "
PYTHON = re.compile(
    r"\bTrue\b|\bFalse\b|\bNone\b|\w\(\w+=|<class|Path\(|torch\.(?!\d)|= \(|datetime"
)
"""Python's forms of values, which do not belong into messages."""


class Mistake(NamedTuple):
    """An entry of the corpus."""

    lines: list[str]
    """Lines of my.toml, and at last perhaps a command after `$`."""
    said: str

    @property
    def toml(self) -> str:
        return "".join(f"{line}\n" for line in self.lines if not line.startswith("$ "))

    @property
    def command(self) -> str:
        return self.lines[-1].removeprefix("$ ") if self.lines[-1].startswith("$ ") else ""


def entries(text: str) -> Iterator[str | Mistake]:
    """Yield the mistakes of a corpus, and its empty lines and comments as they are. A mistake whose
    message is not there yet has an empty one."""
    lines: list[str] = []
    all_lines = text.splitlines()
    for line, following in zip(all_lines, [*all_lines[1:], ""], strict=True):
        if not line or line.startswith("#"):
            yield line
        elif not line.startswith(INDENT):
            lines.append(line)
            if line.startswith("$ ") or following.startswith(INDENT) or not following:
                said = following.removeprefix(INDENT) if following.startswith(INDENT) else ""
                yield Mistake(lines, said)
                lines = []


def prepare(folder: Path) -> None:
    """Put into `folder`, the current one, the checkout's configurations, a small configuration with
    its corpus, a finished run of it, its model in Hugging Face's format, data sets of its and of
    other vocabularies, and files that are not what a command looks for."""
    (folder / "configs").symlink_to(ROOT / "configs")
    config = write_config(folder, steps=8)
    config.write_text(config.read_text().replace(f"{folder}/", ""))
    for name, content in {"notes.txt": "text\n", "my-model/config.json": "{}"}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    for command in (
        "train tiny.toml --run-dir run",
        "export run model",
        "data make code corpus --tokenizer run/tokenizer.json --workers 1",
        "data make other corpus --vocab-size 290 --workers 1",
        "data make large corpus --vocab-size 310 --workers 1",
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(command.split()) == 0


def said_of(mistake: Mistake) -> str:
    """Return what Lather says about a mistake, in the current folder."""
    file = Path("my.toml")
    file.write_text(mistake.toml)
    try:
        return _said_by_command(mistake.command) if mistake.command else _said_by_file(file)
    finally:
        file.unlink()


def _said_by_file(file: Path) -> str:
    try:
        load_config(file)
    except ConfigError as error:
        return str(error)
    raise AssertionError("nothing is refused")


def _said_by_command(command: str) -> str:
    words, variables = shlex.split(command), {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    out, error = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, variables),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        status = main(words[1:])
    assert status == 2, f"{command}\n{out.getvalue()}"
    assert out.getvalue() == ""
    return error.getvalue().removesuffix("\n")


def files_below(folder: Path) -> dict[Path, int]:
    """Return when each file was last changed, 0 for a folder; the lock of a run holds nothing."""
    return {
        path: path.stat().st_mtime_ns if path.is_file() else 0
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


ALL = [entry for entry in entries(CORPUS.read_text("utf-8")) if isinstance(entry, Mistake)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("mistakes")
    with contextlib.chdir(folder):
        prepare(folder)
        yield folder


@pytest.mark.parametrize("mistake", ALL, ids=["; ".join(mistake.lines) for mistake in ALL])
def test_a_mistake_is_answered_by_one_line_and_changes_nothing(
    mistake: Mistake, prepared: Path
) -> None:
    before = files_below(prepared)
    said = said_of(mistake)
    assert said == mistake.said
    assert files_below(prepared) == before
    assert len(said.splitlines()) == 1
    assert {*PYTHON.findall(said)} <= {*PYTHON.findall(str(mistake.lines))}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_of_another_type_or_out_of_range_is_refused_by_name(family: str) -> None:
    model = {"model": {"model_type": family}}
    for name, hint in fields_below(Config, family):
        values: list[object] = [[["x"]]]
        if int in union_parts(hint):
            values.append(-2)  # -1 may stand for the last block
        if float in union_parts(hint):
            values += [-1.0, math.nan]
        for value in values:
            with pytest.raises(ConfigError, match=rf"^{name} = .* is not valid: it must be \S"):
                config_from_mapping(merged(model, {name: value}))


def fields_below(cls: type, family: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and types of all fields for one model family, but for options of rules
    (tests/train/test_optim_config.py)."""
    for name, field in fields_of(OptimConfig if prefix == "optim." else cls).items():
        if field.sections:
            section = FAMILIES[family].config if name == "model" else field.sections[0]
            yield from fields_below(section, family, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in ("model.model_type", "optim.lr"):
            yield f"{prefix}{name}", field.hint


def record() -> None:
    """Write what is said now into the corpus."""
    lines = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        prepare(Path(folder))
        for entry in entries(CORPUS.read_text("utf-8")):
            if isinstance(entry, Mistake):
                lines += [*entry.lines, INDENT + said_of(entry)]
            else:
                lines.append(entry)
    CORPUS.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    record()
