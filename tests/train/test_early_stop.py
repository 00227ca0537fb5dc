"""A run that ends after validations that were no better, and keeps the best; resumed it ends at the
same step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lather.checkpoint.folder import list_checkpoints, step_of
from lather.config.config import Config
from lather.errors import ConfigError
from lather.sweep.results import result_of
from lather.train.best import BestValidation, has_ended, validations
from lather.train.display import PlainDisplay
from lather.train.loop import train
from lather.train.report import report_data
from lather.train.requests import RunRequests
from tiny_run import last_weights, timeless_rows

MakeConfig = Callable[..., Config]


def patient(make_config: MakeConfig, run_dir: Path, **changes: Any) -> Config:
    """A run that learns nothing, so that no validation is lower than the first."""
    return make_config(
        run_dir=str(run_dir),
        optim={"lr": 0.0},
        train={"steps": 20, "validation_every": 2, "patience": 2} | changes,
        checkpoint={"every": 5, "keep_last": 1},
    )


def stopping(after: int) -> RunRequests:
    calls = iter(range(10**6))
    return RunRequests(stop=lambda: next(calls) >= after)


def test_a_run_without_progress_ends_and_resumes_to_the_same_end(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = patient(make_config, tmp_path / "run")
    outcome = train(config, PlainDisplay(100))
    assert (outcome.finished, outcome.step) == (True, 6)
    assert outcome.sample
    out = capsys.readouterr().out
    assert "2 validations in a row were no lower than before, so the run ends" in out
    assert f"the best checkpoint is {tmp_path}/run@2, with 5." in out
    checkpoints = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [step_of(path) for path in checkpoints] == [2, 6]
    result = result_of(tmp_path / "run", config)
    assert result is not None
    assert result.loss == outcome.validation_losses[-1]
    assert report_data(tmp_path / "run", [])["finished"]

    stopped = patient(make_config, tmp_path / "stopped")
    for after in (3, 2, 20, 20):
        last = train(stopped, PlainDisplay(100), stopping(after))
    assert (last.finished, last.step) == (True, 6)
    assert timeless_rows(tmp_path / "stopped") == timeless_rows(tmp_path / "run")
    assert last_weights(tmp_path / "stopped") == last_weights(tmp_path / "run")

    assert train(patient(make_config, tmp_path / "run", patience=3), PlainDisplay(100)).step == 8
    assert train(patient(make_config, tmp_path / "run", patience=0), PlainDisplay(100)).step == 20


def test_a_set_that_does_not_exist_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config = patient(make_config, tmp_path / "run", patience_on="books")
    with pytest.raises(ConfigError, match=r"train.patience_on = 'books' is not valid"):
        train(config, PlainDisplay(100))
    assert not (tmp_path / "run").exists()


def test_patience_without_a_held_out_set_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"train.patience = 2 needs a held-out set"):
        BestValidation(make_config(train={"patience": 2}), [])
    assert not BestValidation(make_config(), []).is_over


def test_a_set_without_labels_ends_no_run(make_config: MakeConfig) -> None:
    best = BestValidation(make_config(train={"patience": 2}), ["a"])
    for row in rows_of([None] * 6, [None] * 6):
        assert not best.add(row)
    assert not best.is_over
    after_a_loss = [(1, 2.0), (2, math.inf), (3, math.inf)]
    assert has_ended(after_a_loss, 2), "one that is not finite after a finite one counts"


def test_patience_needs_validations(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"train.patience = 2 needs validations"):
        make_config(train={"patience": 2, "validation_every": 0})


def rows_of(losses: list[float | None], others: list[float | None]) -> list[dict[str, Any]]:
    return [
        {"step": step, "validation_loss": loss, "validation_losses": {"a": loss, "b": other}}
        for step, (loss, other) in enumerate(zip(losses, others, strict=True))
    ]


def test_validations_of_a_set() -> None:
    """A validation before the first step does not count; a loss that is not finite is highest."""
    rows = rows_of([1.0, 5.0, None, 3.0], [1.0, 2.0, 2.5, math.nan])
    assert validations(rows) == [(1, 5.0), (2, math.inf), (3, 3.0)]
    assert validations(rows, "b") == [(1, 2.0), (2, 2.5), (3, math.inf)]
    only = [{"step": 4, "validation_loss": 2.0}, {"step": 4, "loss": 2.0}]
    assert validations(only, "a") == validations(only) == [(4, 2.0)]


@pytest.mark.parametrize(
    ("losses", "ends"), [([], 0), ([3], 0), ([3, 3], 1), ([3, 2, 1], 0), ([1, 2, 3, 4], 3)]
)
def test_patience_counts_validations_after_the_best(losses: list[float], ends: int) -> None:
    found = [(step, float(loss)) for step, loss in enumerate(losses)]
    assert [patience for patience in range(5) if has_ended(found, patience)] == [
        *range(1, ends + 1)
    ]


def test_a_named_set_decides(make_config: MakeConfig) -> None:
    config = make_config(train={"patience": 2, "patience_on": "b"})
    best = BestValidation(config, ["a", "b"])
    rows = rows_of([9.0, 5.0, 4.0, 3.0], [9.0, 2.0, 2.5, 2.5])
    assert [best.add(row) for row in rows] == [False, True, False, False]
    assert best.is_over
    again = BestValidation(config, ["a", "b"])
    again.restore(again.of_rows(rows), {2, 3})
    assert (again.is_over, again.step, again.loss) == (True, 2, 2.5)
