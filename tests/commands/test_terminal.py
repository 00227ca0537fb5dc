"""Commands on a terminal: no line is wider than it, no word is broken, and nothing of what a pipe
gets is missing."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lather.cli import main
from lather.commands import COMMANDS
from tiny_run import write_config

LONG = "a-held-out-set-whose-name-is-longer-than-any-column-may-be"
Show = Callable[..., list[str]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Run a command with standard output on a terminal of some columns; return what it printed, by
    lines and without colors."""

    def run(columns: int, *arguments: object) -> list[str]:
        ours, theirs = pty.openpty()
        pieces: list[bytes] = []

        def read() -> None:
            try:
                while piece := os.read(ours, 1 << 16):
                    pieces.append(piece)
            except OSError:  # the other end is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        with monkeypatch.context() as patch, open(theirs, "w", encoding="utf-8") as terminal:
            patch.setenv("COLUMNS", str(columns))
            patch.setenv("TERM", "xterm-256color")
            patch.setattr(sys, "stdout", terminal)
            try:
                status = main([*map(str, arguments)])
            except SystemExit as exit_:
                status = int(exit_.code or 0)
        reader.join()
        os.close(ours)
        assert status == 0, arguments
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(pieces).decode())
        return [line.rstrip() for line in re.split(r"[\r\n]+", text)]

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, its corpus, and two held-out sets."""
    folder = tmp_path_factory.mktemp("terminal")
    write_config(folder, steps=4).rename(folder / "config.toml")
    tokenizer = ["--tokenizer", str(folder / "a" / "tokenizer.json")]
    for name, options in (("a", ["--vocab-size", "300"]), (LONG, tokenizer)):
        more = ["--holdout-every", "4", "--workers", "1"]
        assert (
            main(["data", "make", str(folder / name), str(folder / "corpus"), *options, *more]) == 0
        )
    return folder


def check(lines: list[str], columns: int) -> str:
    """No line is wider than the terminal, but for a path that does not fit; returns all words."""
    for line in lines:
        assert len(line) <= columns or len([word for word in line.split() if "/" in word]) == 1, (
            line
        )
    return " ".join(" ".join(lines).split())


PAGES = (
    [],
    ["data"],
    ["bench"],
    ["train", "--help", "all"],
    *([name] for name in COMMANDS if name not in ("data", "bench")),
)


@pytest.mark.parametrize("columns", [60, 100])
def test_every_page_of_help_fits(
    show: Show, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    for page in PAGES:
        arguments = page if "--help" in page else [*page, "--help"]
        lines = show(columns, *arguments)
        assert max(map(len, lines)) <= columns, (page, max(lines, key=len))
        if page in ([], ["data"], ["bench"]):
            assert main(arguments) == 0
            assert " ".join(lines).split() == capsys.readouterr().out.split()


def test_words_of_options_are_not_broken(show: Show) -> None:
    for columns in (60, 80, 100):
        words = " ".join(show(columns, "train", "--help")).split()
        assert "--train.micro-batch-size" in words
        assert "{attention,experts,shared_experts}" in words or "shared_experts}" in words


@pytest.mark.parametrize("columns", [60, 200])
def test_a_run_and_what_is_made_of_it_fit(show: Show, folder: Path, columns: int) -> None:
    run = folder / f"run-{columns}"
    sets = ["--data.path", folder / "a", "--data.validation", LONG, folder / LONG]
    shown = check(
        show(columns, "train", folder / "config.toml", "--run-dir", run, *sets, "--train.steps", 4),
        columns,
    )
    assert "step 4/4 " in shown
    assert re.search(
        r" s, 0 s left loss \d\.\d{4} lr \d\.\d\de-\d\d grad \d+\.\d\d [\d,]+ tokens/s \d\.\d\d "
        r"GiB ",
        shown,
    )
    assert " before, " in shown
    assert " of training " in shown
    sets = [f"{LONG}={folder / LONG}", f"a={folder / 'a'}"]
    shown = check(show(columns, "eval", run, *sets), columns)
    for name in ("set", "split", "sequences", "perplexity", "byte", "accuracy", "validation"):
        assert name in shown
    for command in (
        ("data", "show", folder / LONG),
        ("data", "check", folder / LONG),
        ("generate", run, "--prompt", "a", "--num-samples", "2", "--tokens", "2"),
    ):
        check(show(columns, *command), columns)


def test_findings_of_the_doctor_fit(show: Show, tmp_path: Path) -> None:
    lines = show(60, "doctor", "--run-dir", tmp_path / "runs", "--device", "cpu")
    assert "nothing is wrong" in check(lines, 60)
