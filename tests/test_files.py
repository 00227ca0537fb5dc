"""A full disk gives one line with the file, the room that is left and a remedy; nothing
half-written stays; and the same command works when there is room."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lather import files
from lather.cli import main
from lather.data.shards import ShardWriter
from lather.errors import ExchangeError, UserError
from lather.files import whole_file, write_aside
from lather.safetensors_file import open_safetensors
from lather.train.metrics import MetricsWriter
from lather.train.plot import draw


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_that_is_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    write_aside(file, "before")
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", full)
        with pytest.raises(OSError, match=rf"No space left on device: '{file}'"):
            write_aside(file, b"after")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "before"}
    write_aside(file, b"after")
    assert file.read_text() == "after"


def test_a_name_that_is_not_utf_8_is_refused_with_its_field(tmp_path: Path) -> None:
    name = os.fsdecode(b"corpus-\xff")
    with pytest.raises(UserError) as refused:
        write_aside(tmp_path / "config.toml", f'seed = 1\nsource = "{name}"\n[train]\n')
    assert f'config.toml: source = "{name}" is not UTF-8: rename' in str(refused.value)
    assert not [*tmp_path.iterdir()]


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file.name)
    for text in ("new", "replaced"):
        with whole_file(link, "--json") as aside:
            aside.write_text(text)
        assert link.is_symlink()
        assert file.read_text() == text
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_pipes_and_devices_are_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe, "--json") as aside:
        aside.write_text("text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
    for name, printed in {"null": "", "stdout": "text"}.items():
        link = tmp_path / name
        link.symlink_to(f"/dev/{name}")  # which would be replaced, and not the device
        program = "import lather.files, pathlib, sys\n"
        program += "with lather.files.whole_file(pathlib.Path(sys.argv[1]), '--out') as out:\n"
        program += "    out.write_text('text')"
        assert subprocess.check_output([sys.executable, "-c", program, link], text=True) == printed
        assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["null", "pipe", "stdout"]


def test_making_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = tmp_path / "text.txt", tmp_path / "ours"
    source.write_text("some text and more of it\n" * 50)
    options = "--vocab-size 300 --holdout-every 0 --workers 1"
    command = ["data", "make", str(folder), str(source), *options.split()]
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", full)
        assert main(command) == 2
    line = capsys.readouterr().err
    assert re.fullmatch(
        rf"lather: error: {folder}.partial: No space left on device: "
        r"[\d,]+ bytes are free there: free space, .* the same command .*\n",
        line,
    )
    left = sorted(path.name for path in (tmp_path / "ours.partial").rglob("*.*"))
    assert left == [".lock", "plan.json", "tokenizer.json"]
    assert main(command) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full disk at hand")
def test_metrics(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, None)
    writer.file.close()
    writer.file = Path("/dev/full").open("a")  # noqa: SIM115
    with pytest.raises(OSError, match=rf"No space left on device: '{writer.path}'"):
        writer.write({"step": 1})
    with pytest.raises(OSError, match=rf"'{writer.path}'"):
        writer.close()


def test_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half(_: object, out: Path, **__: object) -> None:
        out.write_bytes(b"half")
        full()

    row = (
        '{"step": 1, "loss": 1.0, "seconds": 1.0, "step_seconds": 1.0, "optimizer_seconds": 0.1, '
        '"tokens": 8, "tokens_per_second": 8.0, "peak_memory_bytes": 64}\n'
    )
    (tmp_path / "metrics.jsonl").write_text(row)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    assert main(["plot", str(tmp_path)]) == 2
    assert re.search(
        r"loss.png: cannot be written \(No space left on device: [\d,]+ bytes are free there\)",
        capsys.readouterr().err,
    )
    assert not (tmp_path / "loss.png").exists()
    monkeypatch.undo()
    draw([tmp_path], tmp_path / "loss.png")


def test_a_safetensors_file_that_may_not_be_read_is_not_called_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ExchangeError, match="Permission denied"):
        open_safetensors(tmp_path / "model.safetensors")  # the library says: no such file
