"""Sweeps of real, tiny runs: killed, extended, refused, and with the best configuration."""

from __future__ import annotations

import json
import shutil
import signal
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.image import imread

from lather.config.toml_file import load_config
from lather.files import lock_folder
from lather.sweep.intervals import Mean
from tiny_run import run, start, timeless_rows, write_config

GRID = ("--vary", "optim.lr=5e-3,1e-2", "--vary", "optim.name=muon,soap", "--jobs", 2)
KEYS = {
    f"lr-{lr}_name-{name}_seed-{seed}"
    for lr in (0.005, 0.01)
    for name in ("muon", "soap")
    for seed in (0, 1)
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A configuration, the folder of a sweep of it, and what the command printed."""
    folder = tmp_path_factory.mktemp("sweep")
    config = write_config(folder, steps=3, checkpoint_every=1)
    status, out, err = run("sweep", config, *GRID, "--seeds", 2, "--out", folder / "sweep")
    assert (status, err) == (0, "")
    return config, folder / "sweep", out


def losses(sweep: Path) -> dict[str, float]:
    """The last validation loss of every run, by its key."""
    return {
        path.parent.name: json.loads(path.read_text().splitlines()[-1])["validation_loss"]
        for path in sweep.glob("runs/*/metrics.jsonl")
    }


def table_of(out: str) -> list[list[str]]:
    """The rows of the table, which is the last thing with lines of columns."""
    lines = [line.split() for line in out.splitlines()]
    begin = max(index for index, line in enumerate(lines) if "seeds" in line and "state" in line)
    rows = lines[begin + 2 :]
    return rows[: next(index for index, row in enumerate(rows) if not row)]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_each_combination_is_a_run_and_rows_have_means_with_intervals(
    finished: tuple[Path, Path, str],
) -> None:
    _, sweep, out = finished
    found = losses(sweep)
    assert found.keys() == KEYS
    expected = {
        (lr, name): Mean.of([found[f"lr-{lr}_name-{name}_seed-{seed}"] for seed in (0, 1)])
        for lr in ("0.005", "0.01")
        for name in ("muon", "soap")
    }
    ordered = sorted(expected.items(), key=lambda item: item[1].value)
    assert table_of(out) == [
        [lr, name, *mean.text(4).split(), "2/2", "done"] for (lr, name), mean in ordered
    ]
    assert imread(sweep / "sweep.png").shape[1] > 500
    assert "The best optim.lr, 0.01, is at the edge of its values: extend them with higher" in out


def test_the_run_of_a_combination_is_that_of_lather_train(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    config, sweep, _ = finished
    options = ("--optim.lr", "5e-3", "--optim.name", "muon", "--seed", 1)
    assert run("train", config, *options, "--run-dir", tmp_path / "run")[0] == 0
    rows = timeless_rows(sweep / "runs" / "lr-0.005_name-muon_seed-1")
    assert timeless_rows(tmp_path / "run") == rows


def test_the_best_configuration_trains_as_it_is(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, sweep, _ = finished
    best = sweep / "best.toml"
    assert best.read_text().startswith("# lather sweep: optim.lr=0.01 optim.name=soap: validation")
    assert "seed" not in tomllib.loads(best.read_text())
    config = load_config(best)
    assert config.run_dir == str(sweep / "runs" / "lr-0.01_name-soap_best")
    assert (config.optim.name, config.optim.lr) == ("soap", 0.01)
    assert run("train", best, "--run-dir", tmp_path / "run")[0] == 0
    rows = timeless_rows(sweep / "runs/lr-0.01_name-soap_seed-0")
    assert timeless_rows(tmp_path / "run") == rows


def test_a_finished_sweep_runs_nothing_and_further_values_and_seeds_extend_it(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    config, whole, out = finished
    sweep = tmp_path / "sweep"
    shutil.copytree(whole, sweep)
    before = {path: path.stat().st_mtime_ns for path in sweep.glob("runs/*/metrics.jsonl")}
    status, again, _ = run("sweep", config, *GRID, "--seeds", 2, "--out", sweep)
    assert status == 0
    assert table_of(again) == table_of(out)
    more = ("--vary", "optim.name=soap", "--vary", "optim.lr=1e-2,0.02")
    status, out, _ = run("sweep", config, *more, "--seeds", 3, "--out", sweep)
    assert status == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert losses(sweep).keys() - KEYS == {
        "lr-0.01_name-soap_seed-2",
        *(f"lr-0.02_name-soap_seed-{seed}" for seed in range(3)),
    }
    assert len(table_of(out)) == 5
    assert sorted(row[-2] for row in table_of(out)) == ["2/2", "2/2", "2/2", "3/3", "3/3"]


def test_killed_at_any_moment_it_goes_on_to_the_same_numbers(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    config, whole, _ = finished
    sweep = tmp_path / "sweep"
    words = ("sweep", config, *GRID, "--seeds", 2, "--out", sweep)
    for number in (1, 3):
        process = start(*words)
        wait_for(lambda number=number: len(losses_so_far(sweep)) >= number)  # type: ignore[misc]
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(is_in_use, sweep.glob("runs/*/"))))
    (sweep / "runs" / "lr-0.01_name-soap_seed-1").mkdir(exist_ok=True)  # a run just begun
    status, _, err = run(*words)
    assert (status, err) == (0, "")
    assert losses(sweep) == losses(whole)


def losses_so_far(sweep: Path) -> list[Path]:
    return list(sweep.glob("runs/*/checkpoints/step-*"))


def is_in_use(run_dir: Path) -> bool:
    try:
        lock_folder(run_dir, "the run", "--run-dir").close()
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_all_runs_and_leaves_the_table(tmp_path: Path, number: int) -> None:
    config, sweep = write_config(tmp_path, steps=100_000), tmp_path / "sweep"
    words = ("sweep", config, *GRID, "--out", sweep)
    process = start(*words)
    wait_for(lambda: len(list(sweep.glob("runs/*/metrics.jsonl"))) == 2)
    assert "in use by another process" in run(*words)[2]
    time.sleep(0.5)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; the same command goes on" in out
    assert len(table_of(out)) == 4
    assert len(list(sweep.glob("runs/*/checkpoints/step-*"))) >= 2
    assert not any(map(is_in_use, sweep.glob("runs/*/")))
    assert not (sweep / "best.toml").exists()


def test_divergence_and_failure_are_recorded_and_only_failures_are_tried_again(
    tmp_path: Path,
) -> None:
    config, sweep = write_config(tmp_path, steps=12), tmp_path / "sweep"
    words = ("sweep", config, "--vary", "optim.lr=1e-3,1e30", "--out", sweep)
    words = (*words, "--train.max-skipped-steps", 3)
    failing = sweep / "runs" / "lr-0.001_seed-0"
    failing.mkdir(parents=True)
    (failing / "notes.txt").touch()
    status, out, _ = run(*words)
    assert status == 1
    assert "optim.lr=1e+30 seed=0: diverged: 3 steps up to step" in out
    assert "optim.lr=0.001 seed=0: failed: run_dir = " in out
    assert "holds files but no config.toml" in out
    assert not (sweep / "best.toml").exists()
    diverged = (sweep / "runs" / "lr-1e+30_seed-0" / "metrics.jsonl").read_bytes()
    (failing / "notes.txt").unlink()
    status, out, _ = run(*words)
    assert status == 0
    assert [row[1] for row in table_of(out)][1] == "diverged"
    assert (sweep / "runs" / "lr-1e+30_seed-0" / "metrics.jsonl").read_bytes() == diverged
    assert (sweep / "best.toml").exists()


def test_another_base_or_other_fields_are_refused(finished: tuple[Path, Path, str]) -> None:
    config, sweep, _ = finished
    status, _, err = run("sweep", config, *GRID, "--train.steps", 4, "--out", sweep)
    assert status == 2
    assert "begun with another configuration: train.steps is 3 there and 4 here" in err
    status, _, err = run("sweep", config, "--vary", "optim.lr=1e-2", "--out", sweep)
    assert status == 2
    assert "is a sweep over optim.lr, optim.name, not over optim.lr" in err


def test_runs_take_the_texts_that_were_there_at_the_start(tmp_path: Path) -> None:
    """An edit while runs are made changes none of them, and is refused at the next start."""
    config, sweep = write_config(tmp_path, steps=3), tmp_path / "sweep"
    words = ("sweep", config, "--vary", "optim.lr=5e-3,1e-2,2e-2", "--out", sweep)
    process = start(*words)
    wait_for(lambda: bool(losses_so_far(sweep)))
    text = tmp_path / "corpus" / "m0.py"
    before = text.read_text()
    text.write_text("x = 1\n" * 200)
    assert process.communicate(timeout=60)[1] == ""
    of_runs = [
        json.loads(path.read_text())["data"] for path in sweep.glob("runs/*/provenance.json")
    ]
    assert len(of_runs) == 3
    assert of_runs[1:] == of_runs[:1] * 2
    more = (*words, "--seeds", 2)
    assert run(*words)[0] == 0  # nothing is left to train
    status, _, err = run(*more)
    assert status == 2
    assert f"was begun with other texts than are in {tmp_path / 'corpus'} now: restore" in err
    text.write_text(before)
    assert run(*more)[0] == 0
    text.write_text("x = 1\n" * 200)
    content = json.loads((sweep / "sweep.json").read_text())
    del content["data"]  # as it was written before
    (sweep / "sweep.json").write_text(json.dumps(content))
    assert run(*words, "--seeds", 3)[0] == 0


def test_all_runs_start_from_the_checkpoint_that_was_the_newest_at_first(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    """The run that `init_from` names goes on and saves another before values are added."""
    config, others, _ = finished
    source, sweep = tmp_path / "first", tmp_path / "sweep"
    shutil.copytree(others / "runs" / "lr-0.01_name-muon_seed-0", source)
    newest = source / "checkpoints" / "step-00000003"
    newest.rename(tmp_path / "later")
    words = ("sweep", config, "--init-from", source, "--train.steps", 1, "--out", sweep)
    varied = ("sweep", config, "--vary", f"init_from={source}", "--train.steps", 1)
    varied = (*varied, "--out", tmp_path / "varied")
    assert run(*words, "--vary", "optim.lr=1e-2")[0] == 0
    assert run(*varied)[0] == 0
    (tmp_path / "later").rename(newest)
    assert run(*words, "--vary", "optim.lr=1e-2,5e-3")[0] == 0
    assert run(*varied, "--seeds", 2)[0] == 0
    for folder in (sweep, tmp_path / "varied"):
        runs = [load_config(path) for path in folder.glob("runs/*/config.toml")]
        assert [each.init_from for each in runs] == [f"{source}@2"] * 2
    status, _, err = run(*words[:3], f"{source}@3", *words[4:], "--vary", "optim.lr=1e-2")
    assert status == 2
    assert f"init_from is '{source}@2' there and '{source}@3' here" in err


def test_another_held_out_set_is_refused(tmp_path: Path) -> None:
    config, sweep, held_out = write_config(tmp_path, steps=3), tmp_path / "sweep", tmp_path / "held"
    make = ("data", "make", held_out, tmp_path / "corpus", "--vocab-size", 300)
    assert run(*make)[0] == 0
    words = ("sweep", config, "--vary", "optim.lr=5e-3", "--out", sweep)
    words = (*words, "--data.path", held_out, held_out, "--data.weights", 1, 2)
    words = (*words, "--data.validation", "other", tmp_path / "other")
    shutil.copytree(held_out, tmp_path / "other")
    assert run(*words)[0] == 0
    shutil.rmtree(tmp_path / "other")
    tokenizer = ("--tokenizer", held_out / "tokenizer.json")
    assert run("data", "make", tmp_path / "other", config, *tokenizer)[0] == 0
    status, _, err = run(*words, "--seeds", 2)
    assert status == 2
    assert f"other texts than are in {held_out}, {tmp_path / 'other'} now" in err


def test_averages_are_judged_if_told_and_best_does_not_need_the_picture(tmp_path: Path) -> None:
    config, sweep = write_config(tmp_path, steps=6), tmp_path / "sweep"
    words = ("sweep", config, "--vary", "train.average_timescale=0.2,0.5", "--out", sweep)
    assert "which are of the raw weights: add --weights average" in run(*words)[1]
    (sweep / "sweep.png").unlink()
    (sweep / "sweep.png").mkdir()
    (sweep / "best.toml").unlink()
    status, out, err = run(*words, "--weights", "average")
    assert (status, err) == (0, "")
    last = {
        path.parent.name: json.loads(path.read_text().splitlines()[-1])
        for path in sweep.glob("runs/*/metrics.jsonl")
    }
    shown = {row[0]: row[1] for row in table_of(out)}
    assert shown == {
        value: f"{last[f'average_timescale-{value}_seed-0']['average_validation_loss']:.4f}"
        for value in ("0.2", "0.5")
    }
    assert len({*shown.values()}) == 2
    assert f"{sweep / 'sweep.png'} cannot be written" in out
    assert "validation loss of averages" in (sweep / "best.toml").read_text()
    assert f"lather train {sweep / 'best.toml'}" in out
