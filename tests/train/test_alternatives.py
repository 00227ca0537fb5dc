"""A choice on the command line replaces the file's alternatives to it, in a new run and in one that
resumes; two alternatives at one level are an error, or have an order that is documented."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from lather.commands.train import read_arguments
from lather.config.config import Config
from lather.config.fields import field_names
from lather.config.kind_config import KINDS
from lather.config.toml_file import REPLACED, config_to_toml
from lather.train.start import start_of
from tiny_run import run, write_config

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.toml"

PAIRS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "source": (
        {"data": {"path": ["a", "b"], "weights": [1.0, 2.0]}},
        ["--data.source", "text"],
        {"data.source": "text", "data.path": (), "data.weights": ()},
    ),
    "balance coefficient": (
        {"moe": {"balance_coefficient": 0.5}},
        ["--model.aux-loss-alpha", "0.25"],
        {"model.aux_loss_alpha": 0.25, "moe.balance_coefficient": None},
    ),
    "balance level": (
        {"moe": {"balance_level": "global_batch"}},
        ["--model.no-seq-aux"],
        {"model.seq_aux": False, "moe.balance_level": None},
    ),
}
for kind in KINDS:
    for name, other in (("lr", "lr_factor"), ("lr_factor", "lr")):
        PAIRS[f"{name} of {kind}"] = (
            {"optim": {kind: {other: 3.0}}},
            [f"--optim.{kind}.{name}=0.25"],
            {f"optim.{kind}.{name}": 0.25, f"optim.{kind}.{other}": None},
        )


def value_of(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("case", PAIRS)
def test_the_command_line_replaces_the_alternative_in_the_file(case: str, tmp_path: Path) -> None:
    mapping, arguments, expected = PAIRS[case]
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(mapping))
    config = parsed(file, arguments)
    assert {name: value_of(config, name) for name in expected} == expected


def parsed(file: Path, arguments: list[str]) -> Any:
    return read_arguments([str(file), *arguments])[0]


def test_alternatives_are_fields_and_none_is_its_own() -> None:
    known = {*field_names(Config)}
    for field, others in REPLACED.items():
        assert field not in others
        if not field.startswith("optim."):
            assert {field, *others} <= known


@pytest.mark.parametrize("file", ["the configuration", "the run's own"])
def test_a_run_that_resumes_takes_it_as_a_change(file: str, tmp_path: Path) -> None:
    arguments = ["--run-dir", str(tmp_path / "run")]
    config = parsed(QUICKSTART, arguments)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(config_to_toml(config.resolved()))
    path = QUICKSTART if file == "the configuration" else tmp_path / "run/config.toml"
    changed = parsed(path, [*arguments, "--optim.rest.lr", "0.01"])
    start = start_of(tmp_path / "run", changed)
    optim = start.config.optim
    assert (optim.section("rest").lr, optim.section("rest").lr_factor) == (0.01, None)
    assert tomllib.loads(config_to_toml(start.config))["optim"]["rest"]["lr"] == 0.01


def test_a_run_goes_on_with_the_rate_and_records_it(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=2, checkpoint_every=2)
    config.write_text(
        config.read_text().replace("[train]", "[optim.rest]\nlr_factor = 3.0\n[train]")
    )
    where = ["--run-dir", str(tmp_path / "run")]
    assert run("train", config, *where)[0] == 0
    status, _, error = run("train", config, *where, "--train.steps", "3", "--optim.rest.lr", "0.01")
    assert status == 0, error
    recorded = (tmp_path / "run/changes.jsonl").read_text()
    assert '"optim.rest.lr": [null, 0.01]' in recorded
    assert '"optim.rest.lr_factor": [3.0, null]' in recorded


def test_options_of_a_section_that_is_left_out_are_taken() -> None:
    arguments = ["--model.rope-scaling.factor", "4"]
    scaling = parsed(QUICKSTART, arguments).model.rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.truncate) == (4.0, True)
    assert parsed(QUICKSTART, []).model.rope_scaling is None
