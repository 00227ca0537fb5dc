"""Finding checkpoints by name: RUN, RUN@STEP, RUN@best, and --step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lather.checkpoint.folder import find_checkpoint
from lather.errors import UserError

LOSSES = {0: 5.0, 4: 3.0, 8: 2.0, 12: 2.5, 16: 1.0}


def make_run(
    folder: Path, kept: tuple[int, ...] = (4, 8, 12), losses: dict[int, float] | None = None
) -> Path:
    """Make a run that has no checkpoint of step 16 any more."""
    folder.mkdir(parents=True)
    for step in kept:
        (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    (folder / "config.toml").write_text("")
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
