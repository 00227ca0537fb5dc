"""`lather data make FOLDER SOURCE ...`, `lather data show FOLDER` and `lather data check
FOLDER`."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lather.argument import Argument
from lather.commands.parsing import parse_arguments
from lather.config.records import Number
from lather.console import command_console, is_live
from lather.data.dataset import NOTES, DataSet, counts_in_words
from lather.data.hub_files import pinned_recipe
from lather.data.making import make_dataset
from lather.data.recipe import DataRecipe
from lather.durations import duration, spent_and_left
from lather.errors import DataError, UserError
from lather.lines import fit, flow

USAGE = """\
usage: lather data COMMAND ...

  make FOLDER SOURCE [SOURCE ...]   make a data set of text, JSONL, Parquet, chats or tokens
  show FOLDER                       show what a data set holds and what it was made from
  check FOLDER                      read a data set and compare it with its checksums

options of a command: lather data COMMAND --help
"""
PLAIN_SECONDS = 10.0
"""Seconds between progress lines if the output is not a terminal."""


@dataclass(frozen=True)
class MakeArguments:
    """Make a data set. A command that was interrupted continues where it stopped when it is given
    again."""

    folder: Annotated[Path, Argument(positional=True, metavar="FOLDER")]
    """Folder to write the data set to."""
    recipe: Annotated[DataRecipe, Argument(inline=True)]
    workers: Number = 0
    """Number of processes; 0: one per core."""


@dataclass(frozen=True)
class FolderArguments:
    """Arguments for a data set that exists."""

    folder: Annotated[Path, Argument(positional=True, metavar="FOLDER")]
    """Folder of the data set."""


def data_command(arguments: list[str]) -> None:
    """Run the subcommand that the first argument names."""
    commands = {"make": _make, "show": _show, "check": _check}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(fit(USAGE), end="")
        return
    if arguments[0] not in commands:
        raise UserError(
            f"unknown command data {arguments[0]!r}: use one of {', '.join(commands)}, or --help"
        )
    commands[arguments[0]](arguments[1:])


def _make(arguments: list[str]) -> None:
    parsed = parse_arguments(MakeArguments, "lather data make", arguments)
    display = _ConsoleDisplay(command_console())
    with display.live or contextlib.nullcontext():
        recipe = pinned_recipe(parsed.recipe)
        dataset = make_dataset(
            parsed.folder, recipe, display.note, parsed.workers, display.progress
        )
    print(fit(describe(dataset, display)))


def _show(arguments: list[str]) -> None:
    parsed = parse_arguments(FolderArguments, "lather data show", arguments)
    print(fit(describe(DataSet(parsed.folder))))


def _check(arguments: list[str]) -> None:
    dataset = DataSet(parse_arguments(FolderArguments, "lather data check", arguments).folder)
    for name in dataset.manifest.splits:
        dataset.split(name)
    if wrong := dataset.check():
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise DataError(f"{'; '.join(wrong[:5])}{more}: restore them, or make the data set again")
    print(fit(f"{dataset.folder} is as it was made ({dataset.manifest.identity})"))


class _ConsoleDisplay:
    """A progress line: on a terminal it is updated in place, otherwise a new line is printed from
    time to time. Measures the elapsed time."""

    def __init__(self, console: Console) -> None:
        self.console, self.tokens = console, 0
        self.started = self._shown = time.monotonic()
        self.live = None
        if is_live(console):
            self.live = Live("", console=console, refresh_per_second=4, transient=True)

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def progress(self, units: int, num_units: int, documents: int, tokens: int) -> None:
        self.tokens, seconds = tokens, max(1e-9, time.monotonic() - self.started)
        fields = [
            f"{units} of {num_units} units",
            f"{documents:,} documents",
            f"{tokens:,} tokens",
            f"{tokens / seconds:,.0f} tokens/s",
        ]
        if units:
            fields.append(spent_and_left(seconds, seconds / units * (num_units - units)))
        if self.live:
            self.live.update(Text("\n".join(flow(fields, self.console.width))))
        elif time.monotonic() - self._shown > PLAIN_SECONDS:
            self._shown = time.monotonic()
            self.note("  ".join(fields))


def describe(dataset: DataSet, made: _ConsoleDisplay | None = None) -> str:
    """Describe a data set in lines of a name and a value."""
    manifest, source = dataset.manifest, dataset.manifest.made_from
    lines = {"data set": str(dataset.folder)}
    for name, split in manifest.splits.items():
        lines[name] = (
            f"{split.documents:,} documents, {split.tokens:,} tokens, the longest "
            f"{split.longest:,}, {len(split.shards)} shards"
        )
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    if columns := sorted({name for shard in shards for name in shard.columns}):
        lines["columns"] = ", ".join(columns)
    if made is not None and made.tokens:
        seconds = time.monotonic() - made.started
        lines["time"] = f"{duration(seconds)}, {made.tokens / seconds:,.0f} tokens/s"
    ends = f"documents end with {manifest.end_of_text or manifest.end_token}"
    ends = "no token ends documents" if manifest.end_token is None else ends
    lines["vocabulary"] = f"{manifest.vocab_size:,} tokens, {ends}"
    sources = ", ".join(source["recipe"]["sources"])
    lines["made from"] = f"{sources} ({source['files']:,} files, {source['bytes']:,} bytes)"
    if set(manifest.encodings) - {"utf-8"}:
        counts = (f"{count:,} x {name}" for name, count in manifest.encodings.items())
        lines["encodings"] = ", ".join(counts)
    if manifest.skipped:
        lines["not taken"] = dataset.skipped_in_words
    if source["left_out"]:
        lines["left out"] = counts_in_words(source["left_out"])
    if manifest.notes:
        place = f"file and line of each are in {dataset.folder / NOTES}"
        lines["noted"] = f"{counts_in_words(manifest.notes)}; {place}"
    return "\n".join(f"{name:<12} {value}" for name, value in lines.items())
