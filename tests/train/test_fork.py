"""Forks: a run goes on in another directory from any checkpoint of the first, unchanged or with
changes."""

import contextlib
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from stored import stored_tensors

from changing_runs import MakeConfig, losses, run, uninterrupted
from lather.checkpoint.folder import list_checkpoints, step_of
from lather.config.changes import History
from lather.config.config import Config
from lather.config.optim import optim_config
from lather.errors import RunError
from lather.files import read_rows
from lather.train import run_dir as run_dir_module
from lather.train.run_dir import RunDirectory
from lather.train.start import is_fork_of
from tiny_run import TIME_FIELDS

STEPS = 8


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder for the finished run, and for the path at which it was made."""
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def first(make_config: MakeConfig, tmp_path: Path, finished: Path) -> Config:
    """Return a run with checkpoints at 2, 4, 6 and 8, which was trained once for all tests and is
    copied."""
    config = make_config(train={"steps": STEPS}, checkpoint={"keep_last": 9})
    made_at = finished / "made_at.txt"
    if not made_at.exists():
        run(config)
        shutil.copytree(config.run_dir, finished / "run")
        made_at.write_text(str(tmp_path))
        return config
    shutil.copytree(finished / "run", config.run_dir)
    for file in Path(config.run_dir).iterdir():
        if file.suffix in (".toml", ".json", ".jsonl"):
            file.write_text(file.read_text().replace(made_at.read_text(), str(tmp_path)))
    return config


@pytest.fixture
def fork_config(make_config: MakeConfig, first: Config, tmp_path: Path) -> MakeConfig:
    def make(step: int | None = 4, **changes: object) -> Config:
        at = "" if step is None else f"@{step}"
        options = {
            "run_dir": str(tmp_path / "fork"),
            "fork_from": f"{first.run_dir}{at}",
            "checkpoint": {"keep_last": 9},
            **changes,
        }
        options["train"] = {"steps": STEPS, **options.get("train", {})}  # type: ignore[dict-item]
        return make_config(**options)

    return make


def history(config: Config) -> History:
    return History.read(Path(config.run_dir), {})


def checkpoints(config: Config) -> list[Path]:
    return list_checkpoints(Path(config.run_dir) / "checkpoints")


def files_of(folder: str | Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def timeless(run_dir: str | Path) -> list[dict[str, object]]:
    rows = read_rows(Path(run_dir) / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIME_FIELDS} for row in rows]


@pytest.mark.parametrize("step", [2, 4, None])
def test_a_fork_without_changes_has_the_bits_of_the_first_run(
    first: Config, fork_config: MakeConfig, step: int | None
) -> None:
    before = files_of(first.run_dir)
    forked = fork_config(step)
    run(forked)
    assert timeless(forked.run_dir) == timeless(first.run_dir)
    ends = [stored_tensors(checkpoints(config)[-1]) for config in (first, forked)]
    assert ends[0].keys() == ends[1].keys()
    names = [name for name in ends[0] if not name.startswith("random/")]
    assert all(ends[0][name].equal(ends[1][name]) for name in names)
    assert files_of(first.run_dir) == before
    assert step_of(checkpoints(forked)[0]) == step or STEPS
    assert history(forked).forked_from == f"{first.run_dir}@{step or STEPS}"


def test_a_fork_takes_its_changes_from_its_step_on(first: Config, fork_config: MakeConfig) -> None:
    forked = fork_config(4, optim={"lr": 1e-3}, train={"steps": 10})
    notes = run(forked)
    assert losses(forked.run_dir) == uninterrupted(first, forked, changed_at=4)
    assert any("from step 5 on: optim.lr 0.01 -> 0.001, train.steps 8 -> 10" in n for n in notes)
    (row,) = history(forked).rows
    changes = {"optim.lr": (0.01, 0.001), "train.steps": (8, 10)}
    assert (row.forked_from, row.changes) == (f"{first.run_dir}@4", changes)


def test_a_fork_of_before_a_change_does_not_have_it(
    first: Config, fork_config: MakeConfig, make_config: MakeConfig
) -> None:
    """The first run went on with another rate; its fork goes back to the time before."""
    changed = {"train": {"steps": 12}, "optim": {"lr": 1e-3}}
    run(make_config(**changed, checkpoint={"keep_last": 9}))
    plain, later = fork_config(4), fork_config(10, run_dir=f"{first.run_dir}-later", **changed)
    optim = {key: value for key, value in asdict(plain.optim).items() if key != "lr"}
    run(replace(plain, optim=optim_config(**optim)))
    assert losses(plain.run_dir) == losses(first.run_dir)[:STEPS]
    assert [row.changes for row in history(plain).rows] == [{}]
    run(later)
    assert losses(later.run_dir) == losses(first.run_dir)
    rows = [(row.step, bool(row.changes)) for row in history(later).rows]
    assert rows == [(8, True), (10, False)]


def test_the_same_command_goes_on_with_the_fork(fork_config: MakeConfig, first: Config) -> None:
    """It is stopped before its first checkpoint, and after one; and the first run is deleted,
    too."""
    forked = fork_config(4)
    for stop_after in (1, 3):
        run(forked, stop_after)
    Path(first.run_dir).rename(f"{first.run_dir}-moved")
    run(forked)
    assert timeless(forked.run_dir) == timeless(f"{first.run_dir}-moved")


def test_a_fork_of_a_fork(first: Config, fork_config: MakeConfig, tmp_path: Path) -> None:
    forked = fork_config(4, optim={"lr": 1e-3})
    run(forked)
    second = fork_config(
        run_dir=str(tmp_path / "second"), fork_from=f"{forked.run_dir}@6", optim={"lr": 1e-3}
    )
    for _ in range(2):
        run(second)
        assert timeless(second.run_dir) == timeless(forked.run_dir)
    sources = [row.forked_from for row in history(second).rows]
    assert sources == [f"{first.run_dir}@4", f"{forked.run_dir}@6"]


def test_refused_forks_leave_nothing(
    first: Config, fork_config: MakeConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    Path(tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("precious")
    (tmp_path / "corpus" / "1.txt").write_text("other text", "utf-8")
    before = sorted(tmp_path.rglob("*"))
    taken = str(tmp_path / "taken")
    for config, message in [
        (fork_config(3), r"@3: no such checkpoint in .*: use one of 2, 4, 6, 8, or best"),
        (fork_config(4, fork_from=str(tmp_path / "nowhere@4")), "nowhere: not a run"),
        (fork_config(4, seed=3), r"fork_from = .*: seed is 0 there and 3 here, .* the same value"),
        (fork_config(4, train={"steps": 3}), r"steps = 3 is not valid: fork_from = .* done 4"),
        (fork_config(4, run_dir=taken), "holds files: give the fork a --run-dir that is empty"),
        (fork_config(4, run_dir=first.run_dir), "holds a run that is not a fork"),
    ]:
        with pytest.raises(RunError, match=message):
            run(config)
        assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(RunError, match="was trained on other tokens"):
        run(fork_config(4))
    assert not (tmp_path / "fork").exists()


def test_a_disk_that_is_full_leaves_nothing(
    fork_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    forked = fork_config(4)
    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(RunError, match=r"cannot be copied to it .*No space left.*: make room$"):
        run(forked)
    assert not [path for path in tmp_path.iterdir() if "fork" in path.name]


@pytest.mark.parametrize(
    ("forked_from", "name", "expected"),
    [
        ("run@4", "run/@4", True),
        ("run@4", "./run@0004", True),
        ("run@4", "run@best", True),
        ("run@4", "run", True),
        ("run@0", "run@0", True),
        ("run@40", "run@4", False),
        ("run@4", "run-b@4", False),
        ("", "run", False),
    ],
)
def test_names_of_a_fork(forked_from: str, name: str, expected: bool) -> None:
    assert is_fork_of(forked_from, name) is expected


# --- what a fork takes along, and how it may be named ---------------------------------------------


def test_a_fork_of_before_a_mixture_does_without_its_data_sets(
    sets: list[str], make_config: MakeConfig, tmp_path: Path
) -> None:
    common: dict[str, object] = {"checkpoint": {"keep_last": 9}}
    early = make_config(data={"path": sets[:2]}, **common)
    plain = replace(early, train=replace(early.train, steps=8))
    later = make_config(
        data={"path": sets, "weights": [1.0, 1.0, 8.0]}, train={"steps": 8}, **common
    )
    run(early)
    run(later)
    fork = replace(plain, run_dir=str(tmp_path / "fork"), fork_from=f"{plain.run_dir}@4")
    run(fork)
    whole = str(tmp_path / "whole")
    run(replace(early, run_dir=whole))
    run(replace(plain, run_dir=whole))
    assert losses(fork.run_dir) == losses(whole)
    run(replace(later, run_dir=str(tmp_path / "later"), fork_from=f"{plain.run_dir}@6"))
    assert losses(tmp_path / "later") == losses(plain.run_dir)


@pytest.mark.parametrize("before", ["changes.jsonl", "config.toml"])
def test_a_start_that_is_killed_while_it_records_changes_nothing(
    sets: list[str],
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
) -> None:
    """A fork of a run with two mixtures and rates takes back those of before; it is killed before
    each of its files is written."""
    common: dict[str, object] = {"checkpoint": {"keep_last": 9}}
    early = make_config(data={"path": sets[:2], "weights": [1.0, 1.0]}, **common)
    run(early)
    mixture = {"path": sets[:2], "weights": [9.0, 1.0]}
    run(make_config(data=mixture, train={"steps": 8}, optim={"lr": 1e-3}, **common))
    fork = replace(early, run_dir=str(tmp_path / "fork"), fork_from=f"{early.run_dir}@2")
    plain = replace(fork, run_dir=str(tmp_path / "plain"))
    run(plain)
    write = run_dir_module.write_aside

    def killed(path: Path, text: str) -> None:
        if path.name == before:
            raise KeyboardInterrupt
        write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(run_dir_module, "write_aside", killed)
        with contextlib.suppress(KeyboardInterrupt):
            run(replace(fork, optim=replace(fork.optim, lr=0.5)))
    run(fork)
    assert losses(fork.run_dir) == losses(plain.run_dir) == losses(early.run_dir)[:4]


def test_the_same_fork_may_be_spelled_otherwise(
    first: Config, fork_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forked = fork_config(4)
    run(forked)
    monkeypatch.chdir(tmp_path)
    name = Path(first.run_dir).name
    run(replace(forked, fork_from=f"corpus/../{name}@4"))
    with pytest.raises(RunError, match="holds a run that was forked from"):
        run(replace(forked, fork_from=f"{name}@2"))


def test_a_fork_of_the_first_weights(
    first: Config, fork_config: MakeConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A run that was stopped before its first step has a checkpoint of step 0; the same command
    goes on, and lost checkpoints are reported."""
    stopped = make_config(
        run_dir=str(tmp_path / "stopped"), train={"steps": STEPS}, checkpoint={"keep_last": 9}
    )
    run(stopped, stop_after=0)
    forked = fork_config(0, fork_from=f"{stopped.run_dir}@0", optim={"lr": 1e-3})
    run(forked, stop_after=0)
    run(forked)
    assert losses(forked.run_dir) == uninterrupted(forked, forked)
    shutil.rmtree(Path(forked.run_dir) / "checkpoints")
    with pytest.raises(RunError, match=r"is a fork of .*@0, but its checkpoints are gone"):
        run(forked)


def test_an_empty_folder_is_taken_and_left_as_it_was(
    first: Config, fork_config: MakeConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.chmod(0o750)  # whatever the umask is
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(RunError, match="cannot change during a run"):
        run(fork_config(4, run_dir=str(tmp_path / "link"), seed=4))
    assert not list(folder.iterdir())
    run(fork_config(4, run_dir=str(tmp_path / "link")))
    assert folder.stat().st_mode & 0o777 == 0o750
    assert losses(folder) == losses(first.run_dir)


def test_a_copy_that_was_killed_is_made_anew(
    first: Config, fork_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = fork_config(4)

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", killed)
        with pytest.raises(KeyboardInterrupt):
            RunDirectory(forked)
    assert (Path(forked.run_dir) / "checkpoints").exists()
    run(forked)
    assert timeless(forked.run_dir) == timeless(first.run_dir)
