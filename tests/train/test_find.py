"""Finding checkpoints by name: RUN, RUN@STEP, RUN@best, and --step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lather.checkpoint.folder import find_checkpoint
from lather.config.toml_file import config_from_mapping, config_to_toml
from lather.errors import UserError

LOSSES = {0: 5.0, 4: 3.0, 8: 2.0, 12: 2.5, 16: 1.0}


def make_run(
    folder: Path,
    kept: tuple[int, ...] = (4, 8, 12),
    losses: dict[int, float] | None = None,
    patience_on: str = "",
) -> Path:
    """Make a run that has no checkpoint of step 16 any more."""
    folder.mkdir(parents=True)
    for step in kept:
        (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    config = config_from_mapping({"train": {"patience_on": patience_on}})
    (folder / "config.toml").write_text(config_to_toml(config))
    rows = [
        {"step": step, "validation_loss": loss}
        for step, loss in (LOSSES if losses is None else losses).items()
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [{"step": 8, "loss": 0.1}, *rows])
    )
    return folder


@pytest.mark.parametrize(("suffix", "step"), [("", 12), ("@4", 4), ("@00000008", 8), ("@best", 8)])
def test_a_name_means_a_checkpoint(tmp_path: Path, suffix: str, step: int) -> None:
    run = make_run(tmp_path / "my-run")
    assert find_checkpoint(f"{run}{suffix}") == (run, run / f"checkpoints/step-{step:08d}")


def test_the_best_goes_by_the_set_that_patience_goes_by(tmp_path: Path) -> None:
    rows = [
        {"step": step, "validation_loss": 9.0 - step, "validation_losses": {"a": 9 - step, "b": b}}
        for step, b in ((4, 2.0), (8, 3.0), (12, None))
    ]
    runs = {name: make_run(tmp_path / f"run-{name}", patience_on=name) for name in ("", *"abc")}
    for run in runs.values():
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, step in (("b", 4), ("a", 12), ("", 12)):
        run = runs[name]
        assert find_checkpoint(f"{run}@best") == (run, run / f"checkpoints/step-{step:08d}")
    with pytest.raises(
        UserError, match=r"no validation loss on 'c' \(train.patience_on\) is known"
    ):
        find_checkpoint(f"{runs['c']}@best")


def test_the_option_means_one_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "my-run")
    assert find_checkpoint(str(run), 4) == find_checkpoint(f"{run}@4")
    with pytest.raises(
        UserError, match=r"--step 5: no such checkpoint .*: use one of 4, 8, 12, or best"
    ):
        find_checkpoint(str(run), 5)
    with pytest.raises(UserError, match="both say which checkpoint"):
        find_checkpoint(f"{run}@4", 4)


def test_runs_and_folders_may_have_an_at_in_their_names(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a@b" / "c@8")
    assert find_checkpoint(str(run))[1].name == "step-00000012"
    assert find_checkpoint(str(run), 4)[1].name == "step-00000004"
    assert find_checkpoint(f"{run}@8")[1].name == "step-00000008"


@pytest.mark.parametrize(
    "suffix", ["@5", "@", "@newest", "@-4", "@4.0", "@\N{SUPERSCRIPT TWO}", "@16"]
)
def test_steps_that_are_not_there_are_refused_with_those_that_are(
    tmp_path: Path, suffix: str
) -> None:
    run = make_run(tmp_path / "my-run")
    with pytest.raises(
        UserError, match=r"no such checkpoint in .*checkpoints: use one of 4, 8, 12, or best"
    ):
        find_checkpoint(f"{run}{suffix}")


def test_runs_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for name in ("nowhere", "nowhere@4", "@4"):
        with pytest.raises(UserError, match="not a run"):
            find_checkpoint(str(tmp_path / name))
    with pytest.raises(UserError, match="no checkpoint yet"):
        find_checkpoint(f"{make_run(tmp_path / 'fresh', kept=())}@best")
    with pytest.raises(UserError, match=r"no validation loss is known .*: use one of 4"):
        find_checkpoint(f"{make_run(tmp_path / 'imported', kept=(4,), losses={})}@best")
