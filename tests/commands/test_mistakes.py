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
import os
import re
import shlex
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from lather.cli import main
from lather.config.config import Config
from lather.config.fields import field_names
from lather.config.optim import OptimConfig
from lather.config.toml_file import load_config
from lather.errors import ConfigError, as_toml
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

    toml: str
    command: str
    """The command line without `$`, or an empty string."""
    said: str

    @property
    def name(self) -> str:
        return self.command or "; ".join(self.toml.splitlines())


def mistakes(text: str) -> Iterator[Mistake]:
    """Yield the entries of a corpus; one whose message is not there yet has an empty one."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    toml = ""
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        said = following.removeprefix(INDENT) if following.startswith(INDENT) else ""
        if line.startswith("$ "):
            yield Mistake(toml, line.removeprefix("$ "), said)
            toml = ""
        elif not line.startswith(INDENT):
            toml += f"{line}\n"
            if said:
                yield Mistake(toml, "", said)
                toml = ""


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


ALL = list(mistakes(CORPUS.read_text("utf-8")))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("mistakes")
    with contextlib.chdir(folder):
        prepare(folder)
        yield folder


@pytest.mark.parametrize("mistake", ALL, ids=[mistake.name for mistake in ALL])
def test_a_mistake_is_answered_by_one_line_and_changes_nothing(
    mistake: Mistake, prepared: Path
) -> None:
    before = files_below(prepared)
    said = said_of(mistake)
    assert said == mistake.said
    assert files_below(prepared) == before
    assert len(said.splitlines()) == 1
    assert {*PYTHON.findall(said)} <= {*PYTHON.findall(mistake.name)}


def test_every_field_has_a_value_that_is_refused_by_name_value_and_constraint() -> None:
    """Options of rules have theirs in tests/train/test_optim_config.py."""
    tried = set()
    for mistake in ALL:
        if mistake.command or "is not valid: " not in mistake.said:
            continue
        given, name = dict(values_of(tomllib.loads(mistake.toml))), mistake.said.split()[1]
        if name in given:
            tried.add(name)
            value = given[name]
            shown = [as_toml(value), *(map(as_toml, value) if isinstance(value, list) else ())]
            assert any(text in mistake.said for text in shown), mistake
            assert re.search(r"is not valid: (it must be|give) \S", mistake.said), mistake
    of_rules = {name for name in field_names(Config) if name.startswith("optim.")} - set(
        field_names(OptimConfig, "optim.")
    ) | {"optim.lr"}
    assert set(field_names(Config)) - of_rules <= tried


def values_of(mapping: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, dict):
            yield from values_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def record() -> None:
    """Write what is said now into the corpus."""
    lines = []
    entry: list[str] = []
    text = CORPUS.read_text("utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        prepare(Path(folder))
        for line, following in zip(text, [*text[1:], ""], strict=True):
            if line.startswith(INDENT):
                continue
            lines.append(line)
            if not line or line.startswith("#"):
                continue
            entry.append(line)
            if line.startswith("$ ") or following.startswith(INDENT) or not following:
                toml = "".join(f"{each}\n" for each in entry if not each.startswith("$ "))
                command = line.removeprefix("$ ") if line.startswith("$ ") else ""
                lines.append(INDENT + said_of(Mistake(toml, command, "")))
                entry = []
    CORPUS.write_text("\n".join(lines).rstrip("\n") + "\n", "utf-8")


if __name__ == "__main__":
    record()
