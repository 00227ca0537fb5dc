"""A run's own config.toml, or its folder, means that run: from any folder, by any path, and after
the run was moved or copied."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lather.checkpoint.folder import list_checkpoints, step_of
from lather.cli import main
from lather.commands.train import read_arguments
from lather.config.config import Config
from lather.config.toml_file import load_config
from lather.files import read_rows
from lather.train.run_config import current_config
from tiny_run import write_config


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of two steps, whose configuration has relative paths only."""
    folder = tmp_path_factory.mktemp("made") / "project"
    folder.mkdir()
    config = write_config(folder, steps=2, checkpoint_every=1)
    text = (
        config.read_text()
        .replace(f'"{folder}/corpus"', '"corpus"')
        .replace(f'"{folder}/data"', '"data"')
    )
    config.write_text(f'run_dir = "runs/x"\n{text}')
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert train("tiny.toml", "--train.minutes", "60") == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project, and another folder beside it as the current one."""
    shutil.copytree(made, tmp_path / "project")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    return tmp_path / "project"


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in read_rows(run / "metrics.jsonl") if "loss" in row]


def files_here() -> list[str]:
    return sorted(os.listdir())


def train(*arguments: str) -> int:
    """Train with what is quick; the numbers of a run are tested elsewhere."""
    quick = ("--log.sample-tokens", "0", "--train.validation-every", "0")
    return main(["train", *arguments, *quick])


def read(*arguments: str) -> Config:
    """Return the configuration with which `lather train` would train."""
    return read_arguments([*arguments])[0]


def is_at_home(config: Config, run: Path, project: Path) -> bool:
    """Tell whether a configuration means this run, and the project's data."""
    found = config.run_dir, config.data.source, config.data.cache_dir
    return [Path(path).resolve() for path in found] == [run, project / "corpus", project / "data"]


def test_it_means_the_run_from_another_folder_by_any_path(
    project: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("file.toml").symlink_to(project / "runs/x/config.toml")
    Path("folder").symlink_to(project / "runs/x")
    before = files_here()
    own = "../project/runs/x/config.toml"
    for name in (own, str(project / "runs/x"), "file.toml", "folder"):
        assert is_at_home(read(name), project / "runs/x", project), name
    assert train(own, "--train.steps", "4") == 0
    assert "step-00000002" in capsys.readouterr().out
    assert steps_of(project / "runs/x") == [1, 2, 3, 4]
    assert files_here() == before
    assert sorted(os.listdir(project)) == ["corpus", "data", "runs", "tiny.toml"]


def test_it_resumes_the_run_from_within_and_the_first_command_still_does(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / "runs/x")
    assert train("config.toml", "--train.steps", "3") == 0
    monkeypatch.chdir(project)
    assert train("tiny.toml", "--train.steps", "4") == 0
    assert steps_of(project / "runs/x") == [1, 2, 3, 4]
    assert load_config(project / "runs/x/config.toml").run_dir == "runs/x"


@pytest.mark.parametrize("to", ["runs/y", "../gone/runs/x"])
def test_a_moved_run_is_that_run_and_its_paths_begin_at_the_current_folder(
    project: Path, to: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Path(os.path.normpath(project / to))
    target.parent.mkdir(parents=True, exist_ok=True)
    (project / "runs/x").rename(target)
    assert train(str(target), "--train.steps", "3") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "data.source = 'corpus'" in error
    monkeypatch.chdir(project)
    assert is_at_home(read(str(target)), target, project)
    assert train(str(target), "--train.steps", "3") == 0
    assert "step-00000002" in capsys.readouterr().out
    assert steps_of(target) == [1, 2, 3]
    assert not (project / "runs/x").exists()


def test_a_copy_is_not_the_original(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    shutil.copytree("runs/x", "runs/copy")
    assert train("runs/copy/config.toml", "--train.steps", "3") == 0
    assert steps_of(Path("runs/copy")) == [1, 2, 3]
    assert steps_of(Path("runs/x")) == [1, 2]


def test_with_another_run_dir_it_is_the_configuration_of_another_run(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = str(project / "runs/x/config.toml")
    assert train(own, "--run-dir", "new") == 0
    assert steps_of(Path("new")) == [1, 2]
    fork = ("--run-dir", "fork", "--fork-from", own, "--train.steps", "3")
    assert [train(own, *fork) for _ in range(2)] == [0, 0]
    assert [step_of(path) for path in list_checkpoints(Path("fork/checkpoints"))] == [2, 3]
    assert steps_of(project / "runs/x") == [1, 2]


def test_a_configuration_of_ones_own_may_be_called_so(project: Path) -> None:
    (project / "tiny.toml").rename("config.toml")
    shutil.copytree(project / "corpus", "corpus")
    assert train("config.toml") == 0
    assert steps_of(Path("runs/x")) == [1, 2]
    assert steps_of(project / "runs/x") == [1, 2]


@pytest.mark.parametrize(
    "name",
    [
        "../project/runs/x/checkpoints/step-00000002",
        "../project/runs/x@2",
        "../project/runs/x@best",
    ],
)
def test_a_checkpoint_is_refused_with_both_remedies(
    project: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_here()
    assert train(name) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "lather train ../project/runs/x takes the run" in error
    assert "--fork-from ../project/runs/x@" in error
    assert files_here() == before


def test_commands_for_runs_take_the_file_and_a_checkpoints_folder(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = str(project / "runs/x/config.toml")
    assert main(["generate", own, "--prompt", "def", "--tokens", "2"]) == 0
    assert main(["eval", own]) == 0
    assert main(["export", own, "exported"]) == 0
    assert main(["report", own, "--out", "page.html"]) == 0
    capsys.readouterr()
    assert main(["export", str(project / "runs/x/checkpoints/step-00000001"), "first"]) == 0
    assert capsys.readouterr().out.startswith("step-00000001")


def test_the_limit_of_a_launch_is_not_that_of_the_next(project: Path) -> None:
    assert load_config(project / "runs/x/config.toml").train.minutes == 60
    assert current_config(project / "runs/x").train.minutes == 0
