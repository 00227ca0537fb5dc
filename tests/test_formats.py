"""Runs, checkpoints and data sets of other formats are refused in one line, and nothing is
changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lather.cli import main
from lather.data.dataset import MANIFEST
from lather.files import digest_of
from lather.formats import CHECKPOINT, DATA_SET, RUN
from tiny_run import write_config

FORMATS = {"run": RUN, "checkpoint": CHECKPOINT, "data set": DATA_SET}
STEP = "checkpoints/step-00000002"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps, its configuration and its data set."""
    folder = tmp_path_factory.mktemp("formats")
    file = write_config(folder, steps=2)
    assert main(["train", str(file), "--run-dir", str(folder / "run")]) == 0
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current folder, in which no file names the original."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    for file in (copy / "tiny.toml", copy / "run/config.toml", copy / "run/provenance.json"):
        file.write_text(file.read_text().replace(str(finished), str(copy)))
    monkeypatch.chdir(copy)
    return copy


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def set_run(folder: Path, number: int) -> None:
    """Give the run a format. The first has no number."""
    file = folder / "run/config.toml"
    line, _, rest = file.read_text().partition("\n")
    assert line == f"format = {RUN.number}"
    file.write_text(rest if number == 1 else f"format = {number}\n{rest}")


def set_checkpoint(folder: Path, number: int) -> None:
    """Give the checkpoint a format, and a digest that fits it."""
    file = folder / "run" / STEP / "state.json"
    state = json.loads(file.read_text()) | {"format": number}
    del state["digest"]
    file.write_text(json.dumps(state | {"digest": digest_of(state)}))


def set_data_set(folder: Path, number: int) -> None:
    """Give the data set a format, and a checksum that fits it."""
    (file,) = (folder / "data").glob(f"*/{MANIFEST}")
    manifest = json.loads(file.read_text()) | {"format": number}
    del manifest["checksum"]
    file.write_text(json.dumps(manifest | {"checksum": digest_of(manifest)}))


SETTERS: dict[str, Callable[[Path, int], None]] = {
    "run": set_run,
    "checkpoint": set_checkpoint,
    "data set": set_data_set,
}
OF_CHECKPOINT = (
    "train tiny.toml --run-dir run --train.steps 4",
    "train run --train.steps 4",
    "train tiny.toml --run-dir new --fork-from run@2 --train.steps 4",
    "train tiny.toml --run-dir new --init-from run",
    "generate run --prompt x",
    "eval run",
    "export run new",
)
COMMANDS = {
    "run": (*OF_CHECKPOINT, "plan run", "plot run", "report run", "train run --run-dir new"),
    "checkpoint": OF_CHECKPOINT,
    "data set": (
        "train tiny.toml --run-dir run --train.steps 4",
        "train tiny.toml --run-dir new",
        "eval run",
        "data show {data}",
        "data check {data}",
    ),
}


@pytest.mark.parametrize("age", ["older", "newer"])
@pytest.mark.parametrize(
    ("noun", "command"), [(noun, command) for noun in COMMANDS for command in COMMANDS[noun]]
)
def test_a_command_refuses_another_format_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], noun: str, command: str, age: str
) -> None:
    form = FORMATS[noun]
    number = form.number + {"older": -1, "newer": 1}[age]
    SETTERS[noun](folder, number)
    (data,) = (folder / "data").glob(f"*/{MANIFEST}")
    before = contents(folder)
    capsys.readouterr()
    assert main([word.format(data=data.parent) for word in command.split()]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"a {noun} of format {number}; this Lather reads format {form.number}: " in error
    wanted = "make a new one, or use git" if age == "older" else "use the Lather that wrote it"
    assert wanted in error
    after = contents(folder)
    assert {path: after[path] for path in before} == before
    assert {path.name for path in after.keys() - before.keys()} <= {".lock"}


def test_a_file_of_another_format_is_refused_wherever_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, number = (folder / "tiny.toml").read_text(), RUN.number
    for form, status in ((number + 1, 2), (number, 0)):
        (folder / "mine.toml").write_text(f"format = {form}\n{text}")
        assert main(["train", "mine.toml", "--run-dir", "new"]) == status
    assert f"mine.toml: a run of format {number + 1}; " in capsys.readouterr().err


def test_a_configuration_in_the_folder_that_it_names_needs_no_format(folder: Path) -> None:
    (folder / "new").mkdir()
    file = folder / "new/config.toml"
    file.write_text(f'run_dir = "new"\n{(folder / "tiny.toml").read_text()}')
    assert main(["train", str(file)]) == 0
    assert file.read_text().startswith(f"format = {RUN.number}\n")


@pytest.mark.parametrize("noun", FORMATS)
def test_every_earlier_format_has_a_commit_that_reads_it(noun: str, tmp_path: Path) -> None:
    form = FORMATS[noun]
    assert list(form.readers) == list(range(1, form.number))
    for number in form.readers:
        with pytest.raises(form.error, match=f"git checkout {form.readers[number]}, which"):
            form.check(number, tmp_path)
    for damage in (0, None, "2", 2.5):
        with pytest.raises(form.error, match=rf"damaged: the format of a {noun} is .*, and must"):
            form.check(damage, tmp_path)
