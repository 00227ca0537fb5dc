"""Models without experts: runs and their records, plans and their advice, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from changing_runs import run
from lather.cli import main
from lather.config.config import Config
from lather.config.toml_file import config_to_toml
from lather.engine.trained_parameters import active_parameters, trained_parameters
from lather.errors import ConfigError
from lather.files import read_rows
from lather.models.families import FAMILIES

MakeConfig = Callable[..., Config]
DENSE = [name for name, family in FAMILIES.items() if not family.config().num_routed_experts]
SIZES = {
    **{"vocab_size": 264, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "max_position_embeddings": 64,
}


def dense(config: Config, family: str) -> Config:
    return replace(config, model=FAMILIES[family].config(**SIZES))


@pytest.mark.parametrize("family", DENSE)
def test_a_run_has_no_loads_and_goes_on_where_it_stopped(
    make_config: MakeConfig, tmp_path: Path, family: str
) -> None:
    """Whatever `[moe]` says."""
    moe = {"bias_update_rate": 0.1, "z_loss_coefficient": 0.1, "balance_level": "global_batch"}
    config = dense(make_config(moe=moe, log={"expert_load_every": 1}, train={"steps": 6}), family)
    run(config)
    stopped = replace(config, run_dir=str(tmp_path / "stopped"))
    run(stopped, stop_after=3)
    run(stopped)
    rows, again = (read_rows(Path(each.run_dir) / "metrics.jsonl") for each in (config, stopped))
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == [row["loss"] for row in again if "loss" in row]
    assert losses[-1] < losses[0]
    steps = [row for row in rows if "loss" in row]
    names = ["balance_loss", *(f"expert_load_{name}" for name in ("min", "max", "entropy"))]
    assert all(row[name] is None for row in steps for name in names)
    assert not any("expert_load" in row for row in rows)
    assert active_parameters(config) == trained_parameters(config).num_parameters


@pytest.mark.parametrize("family", DENSE)
def test_ranks_cannot_share_experts_that_are_not_there(
    make_config: MakeConfig, family: str
) -> None:
    config = dense(make_config(), family)
    words = rf"^parallel.ep = 2 is not valid: it must be 1, because {family} models have no experts"
    with pytest.raises(ConfigError, match=words):
        replace(config, parallel=replace(config.parallel, ep=2))


@pytest.mark.grid
def test_a_plan_and_its_advice_say_nothing_of_experts(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "llama.toml").write_text(config_to_toml(dense(make_config(), "llama")), "utf-8")
    options = ["--world", "2", "--device", "cpu", "--memory", "1KiB", "--advice", "always"]
    assert main(["plan", str(tmp_path / "llama.toml"), *options]) == 1
    printed = capsys.readouterr().out
    assert "2 ranks, each on a CPU; " in printed
    assert "nothing fits" in printed
    assert "--parallel.ep 2" not in printed
