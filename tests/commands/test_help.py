"""`--help` of commands with a configuration: a short page, a page for each section, a page with
everything."""

from __future__ import annotations

import pytest

from lather.cli import main
from lather.commands.help import OFTEN, SECTIONS
from lather.commands.parsing import read_line
from lather.commands.with_config import take_help
from lather.config.config import Config
from lather.config.fields import field_names
from lather.errors import UserError


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 120])
def test_the_short_page_has_what_is_changed_most_and_all_sections(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = page(capsys, "train", "configs/quickstart.toml", "--optim.name", "soap", "--help")
    assert set(OFTEN) - {"optim.weight_decay"} <= set(field_names(Config))
    for name in OFTEN:
        assert f"  --{name.replace('_', '-')} " in out
    for section in SECTIONS:
        assert f"  --help {section} " in out
    assert "(default: 388)" in out  # the file has these steps
    assert "(default: soap)" in " ".join(out.split())
    assert "--nproc N" in out
    assert "--model.hidden-size" not in out
    assert max(map(len, out.splitlines())) <= columns
    assert len(out.splitlines()) <= 100


def test_a_section(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = page(capsys, "train", "--help", "checkpoint")
    assert "--checkpoint.keep-best" in out
    assert "--train.steps" not in out
    out = page(capsys, "plan", "configs/quickstart.toml", "--help", "optim")
    assert "--optim.momentum" in out
    assert "0.85" in out  # the file has this value
    assert "--world" not in out


def test_plan_shows_its_own_options_and_then_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    short, everything = page(capsys, "plan", "-h"), page(capsys, "plan", "--help=all")
    for option in ("--world INT", "--memory STR", "--advice {auto,always,never}"):
        assert option in short
        assert option in everything
    assert "--train.steps" not in short
    assert "--train.steps" in everything


def test_what_follows_help() -> None:
    assert take_help(read_line(["a", "--x", "1"])) == (read_line(["a", "--x", "1"]), None)
    for line, topic in (("-h", ""), ("-h data", "data"), ("--help=data", "data")):
        assert take_help(read_line(f"--x 1 {line}".split())) == (read_line(["--x", "1"]), topic)
    with pytest.raises(
        UserError,
        match=r"^--help lr: there is no such section: use one of model, .*, profile, .*or all$",
    ):
        take_help(read_line(["--help", "lr"]))
