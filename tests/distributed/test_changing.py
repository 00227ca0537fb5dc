"""Forks and changes on a mesh give the losses of one process that took the same change."""

from pathlib import Path

import pytest

from lather.files import read_rows
from tiny_run import run, write_config


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The configuration, and a run of one process."""
    folder = tmp_path_factory.mktemp("changing")
    config = write_config(folder, steps=8, checkpoint_every=4)
    status, out, err = run("train", config, "--run-dir", folder / "first")
    assert status == 0, out + err
    return config, folder / "first"


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize(
    "mesh", [["--parallel.ep", "2"], ["--parallel.pp", "1"]], ids=["experts", "data"]
)
def test_a_fork_with_a_change_goes_on_on_another_mesh(
    first: tuple[Path, Path], mesh: list[str]
) -> None:
    config, run_dir = first
    change = [
        "--fork-from",
        f"{run_dir}@4",
        "--optim.lr",
        "1e-3",
        "--train.steps",
        "10",
        "--train.micro-batch-size",
        "1",
    ]
    forks = [run_dir.with_name(f"{mesh[0].strip('-')}-{name}") for name in ("alone", "ranks")]
    for fork, ranks in zip(forks, ([], ["--nproc", "2", *mesh]), strict=True):
        status, out, err = run("train", config, "--run-dir", fork, *change, *ranks)
        assert status == 0, out + err
        assert "from step 5 on: optim.lr 0.004 -> 0.001, train.steps 8 -> 10" in out.replace(
            "\n", " "
        )
        assert (fork / "changes.jsonl").read_text().count("\n") == 2
    assert losses(forks[1]) == pytest.approx(losses(forks[0]), rel=1e-4)
    assert losses(forks[0])[:4] == losses(run_dir)[:4]


def test_a_refused_change_is_told_once_and_ends_all_ranks(first: tuple[Path, Path]) -> None:
    config, run_dir = first
    status, _, err = run("train", config, "--run-dir", run_dir, "--nproc", "2", "--seed", "4")
    assert status == 2
    assert err.count("seed is 0 there and 4 here, which cannot change during a run") == 1
