"""`lather train --optim.name X` for every rule, registered or a user's own: it runs, resumes to the
bit, and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from changing_runs import run
from lather.checkpoint.folder import list_checkpoints
from lather.checkpoint.reader import open_checkpoint
from lather.cli import main
from lather.commands.train import read_arguments
from lather.config.toml_file import load_config
from lather.optim.rules import RULES
from tiny_run import last_weights, timeless_rows, write_config

LION = "lion_rule:Lion"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("rules"), steps=6, checkpoint_every=3)


@pytest.mark.parametrize("name", [*RULES, LION])
def test_a_run_of_every_rule_resumes_to_the_bit_and_is_exported(
    name: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    arguments = ["--optim.name", name, "--log.sample-tokens", "0"]
    with torch.random.fork_rng():
        run(read_arguments([str(config), *arguments, "--run-dir", str(run_dir)])[0], stop_after=4)
        assert timeless_rows(run_dir)[-1]["step"] == 4
        assert main(["train", str(config), *arguments, "--run-dir", str(run_dir)]) == 0
        assert "resuming" in capsys.readouterr().out
        assert main(["train", str(config), *arguments, "--run-dir", str(whole)]) == 0
    assert timeless_rows(run_dir) == timeless_rows(whole)
    assert last_weights(run_dir) == last_weights(whole)
    assert load_config(run_dir / "config.toml").optim.name == name
    assert main(["export", str(run_dir), str(tmp_path / "exported")]) == 0
    tensors = open_checkpoint(list_checkpoints(run_dir / "checkpoints")[-1]).table.tensors
    state = {key.rpartition("/")[2] for key in tensors if "o_proj" in key}
    of_rule = {
        **{"adamw": {"exp_avg_sq"}, "muon": {"momentum_buffer"}, LION: {"exp_avg"}},
        **{"shampoo": {"exp_avg_sq", "root_1"}, "psgd_kron": {"factor_0", "curvature_1"}},
        **{"adamuon": {"exp_avg_sq"}, "scion": {"momentum_buffer"}},
    }
    assert of_rule.get(name, {"exp_avg_sq", "basis_1"}) | {"step"} <= state
    losses = [row["validation_loss"] for row in timeless_rows(run_dir) if "validation_loss" in row]
    assert losses[-1] < losses[0]


def test_the_options_of_a_users_rule_are_fields(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--optim.betas", "0.8", "0.98", "--optim.rest.betas", "0.5", "0.6")
    arguments = [str(config), "--optim.name", LION, *options]
    optim = read_arguments(arguments)[0].optim
    assert (optim.name, optim.peak_lr, optim.resolved(8192).lr) == (LION, 1e-3, 1e-3)
    experts, rest = (optim.rule_of(kind) for kind in ("experts", "rest"))  # type: ignore[attr-defined]
    assert (experts.betas, experts.matrix_layout) == ((0.8, 0.98), "per_expert")
    assert rest.betas == (0.5, 0.6)
    with pytest.raises(SystemExit):
        main(["train", str(config), "--optim.name", LION, "--help", "optim"])
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (
        "--optim.betas FLOAT FLOAT Decay rates of the sign's momentum and of the one that is kept. "
        "(default: 0.9 0.99)" in out
    )
