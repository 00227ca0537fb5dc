"""The run directory has one owner, one configuration and one data set; whoever is refused changes
nothing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lather.config.config import Config
from lather.config.optim import optim_config
from lather.config.toml_file import config_to_toml, load_config
from lather.data.batches import Batches
from lather.data.order import Order
from lather.errors import ConfigError, RunError
from lather.train.run_dir import RunData, RunDirectory

MakeConfig = Callable[..., Config]


HOLDER = """
import sys
from pathlib import Path
from lather.config.toml_file import load_config
from lather.train.run_dir import RunDirectory
held = RunDirectory(load_config(Path(sys.argv[1])))
print("held", flush=True)
sys.stdin.read()
"""
"""A program that opens the run of a configuration file and holds it until its standard input
ends."""


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Record contents and times of change of all files below the folder."""
    files = {path: path.is_file() for path in folder.rglob("*")}
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns) if is_file else (b"", 0)
        for path, is_file in files.items()
    }


@contextmanager
def nothing_changes(folder: Path) -> Iterator[None]:
    before = snapshot(folder)
    yield
    assert snapshot(folder) == before


def refusal(config: Config) -> str:
    with pytest.raises(RunError) as caught:
        RunDirectory(config)
    return str(caught.value)


@pytest.fixture
def begun(config: Config) -> Path:
    """A run that has been started once."""
    RunDirectory(config).close()
    return Path(config.run_dir)


# --- whose it is ----------------------------------------------------------------------------------


def test_a_new_run_is_made_with_its_configuration(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(run_dir=str(tmp_path / "deep" / "er" / "run"))
    opened = RunDirectory(config)
    assert opened.path == tmp_path / "deep" / "er" / "run"
    assert load_config(opened.path / "config.toml") == config.resolved()
    assert sorted(path.name for path in opened.path.iterdir()) == [".lock", "config.toml"]
    opened.close()


def test_a_run_is_taken_up_again(config: Config, begun: Path) -> None:
    (begun / "metrics.jsonl").write_text("{}\n")
    RunDirectory(config).close()
    assert (begun / "metrics.jsonl").read_text() == "{}\n"
    assert load_config(begun / "config.toml") == config.resolved()


def test_a_rate_that_is_left_out_is_that_of_the_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """It does not matter what the default was when the run was begun."""
    first = make_config(optim={"lr": 0.123}, run_dir=str(tmp_path / "run"))
    RunDirectory(first).close()
    optim = {key: value for key, value in asdict(first.optim).items() if key != "lr"}
    again = RunDirectory(replace(first, optim=optim_config(**optim)))
    again.close()
    assert again.start.config.optim.lr == 0.123


def test_several_differences_are_counted(make_config: MakeConfig, begun: Path) -> None:
    message = refusal(
        make_config(seed=1, train={"batch_size": 8, "sequence_length": 8}, optim={"lr": 1.0})
    )
    assert "seed is 0 there and 1 here and 2 more, which cannot change during a run;" in message


def test_nothing_changes_before_the_run_is_known_to_go_on(
    make_config: MakeConfig, begun: Path
) -> None:
    with nothing_changes(begun):
        RunDirectory(make_config(log={"every": 7}, optim={"lr": 1.0})).close()


def test_a_folder_that_is_no_run_is_refused(config: Config) -> None:
    folder = Path(config.run_dir)
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    with nothing_changes(folder):
        message = refusal(config)
    assert re.match(
        r"run_dir = .* holds files but no config\.toml.* give another --run-dir", message
    )


def test_an_empty_folder_is_taken(config: Config) -> None:
    Path(config.run_dir).mkdir()
    RunDirectory(config).close()
    assert (Path(config.run_dir) / "config.toml").exists()


@pytest.mark.parametrize("contents", [b"", b"[train", b"\xff\xfe", b"unknown = 1\n"])
def test_a_damaged_configuration_is_named_with_the_remedy(
    config: Config, begun: Path, contents: bytes
) -> None:
    (begun / "config.toml").write_bytes(contents)
    with nothing_changes(begun), pytest.raises((ConfigError, RunError), match=r"run.*--run-dir"):
        RunDirectory(config)


@pytest.mark.parametrize("below", ["", "/run", "/run/deeper"])
def test_a_path_that_is_or_leads_through_a_file_is_refused(
    make_config: MakeConfig, tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("precious")
    with nothing_changes(tmp_path):
        message = refusal(make_config(run_dir=f"{tmp_path / 'file'}{below}"))
    assert re.match(r"run_dir = .*file.* cannot be written \(.*\): give another --run-dir", message)


@pytest.mark.skipif(not sys.prefix.isascii(), reason="in ASCII, torch cannot be imported from here")
def test_text_beyond_the_locales_alphabet_is_kept(make_config: MakeConfig, tmp_path: Path) -> None:
    """A terminal in Latin-1 or ASCII must not decide how the configuration is written."""
    config = make_config(log={"sample_prompt": "日本"})
    file = tmp_path / "config.toml"
    file.write_text(config_to_toml(config), "utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", HOLDER, str(file)]
    subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=True)
    assert load_config(Path(config.run_dir) / "config.toml") == config.resolved()


# --- who is writing it ----------------------------------------------------------------------------


@pytest.fixture
def holder(config: Config, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the run open."""
    file = tmp_path / "config.toml"
    file.write_text(config_to_toml(config), "utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_run_that_another_process_holds_is_refused_until_that_is_gone(
    config: Config, holder: subprocess.Popen[str]
) -> None:
    with nothing_changes(Path(config.run_dir)):
        message = refusal(config)
    assert re.match(
        r"run_dir = .* is in use by another process: wait for it, or give another --run-dir",
        message,
    )
    holder.kill()
    holder.communicate()
    RunDirectory(config).close()


def test_a_refused_open_does_not_hold_the_run(
    config: Config, make_config: MakeConfig, begun: Path
) -> None:
    refusal(make_config(seed=1))
    RunDirectory(config).close()


# --- its data set ---------------------------------------------------------------------------------


MakeData = Callable[[str], RunData]


@pytest.fixture
def make_data(tmp_path: Path) -> MakeData:
    """Make data of a name, with an identity that is the name's."""

    def make(name: str) -> RunData:
        folder = tmp_path / "cache" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(f"tokenizer of {name}")
        return RunData(
            Batches([], Order([1], 0), 1),
            {},
            folder / "tokenizer.json",
            {str(folder): f"identity of {name}"},
        )

    return make


@pytest.fixture
def opened(config: Config, make_data: MakeData) -> Iterator[RunDirectory]:
    """A run that has trained on `books-1`."""
    run = RunDirectory(config)
    run.record(make_data("books-1"))
    run.close()
    (run.path / "checkpoints" / "step-00000002").mkdir(parents=True)
    run = RunDirectory(config)
    yield run
    run.close()


def test_what_does_not_touch_the_numbers_may_change(
    make_config: MakeConfig, opened: RunDirectory, make_data: MakeData
) -> None:
    opened.close()
    changed = make_config(
        checkpoint={"every": 3, "keep_last": 9},
        log={"tensorboard": True, "sample_prompt": "x"},
        train={"micro_batch_size": 1, "device": "auto", "recompute": ["attention"]},
        moe={"memory": "recompute"},
    )
    again = RunDirectory(changed)
    again.record(make_data("books-1"))
    again.close()
    assert load_config(opened.path / "config.toml") == changed.resolved()
    assert again.start.changes == ""
    assert not (opened.path / "changes.jsonl").exists()


def test_a_run_may_move(
    make_config: MakeConfig, opened: RunDirectory, make_data: MakeData, tmp_path: Path
) -> None:
    opened.close()
    opened.path.rename(tmp_path / "moved")
    again = RunDirectory(make_config(run_dir=str(tmp_path / "moved")))
    again.record(make_data("books-1"))
    again.close()
    assert load_config(tmp_path / "moved" / "config.toml").run_dir == str(tmp_path / "moved")


def test_the_data_set_is_recorded_with_its_tokenizer(opened: RunDirectory) -> None:
    assert (opened.path / "tokenizer.json").read_text() == "tokenizer of books-1"
    record = json.loads((opened.path / "provenance.json").read_text())
    assert [identity for _, identity in record["data"]] == ["identity of books-1"]
    assert {"lather", "commit", "python", "torch", "machine", "threads", "cuda"} <= set(record)
    assert sorted(path.name for path in opened.path.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "provenance.json",
        "tokenizer.json",
    ]


def test_each_start_is_recorded_and_one_whose_steps_were_lost_is_not_kept(
    opened: RunDirectory, make_data: MakeData
) -> None:
    def starts() -> list[tuple[int, str]]:
        rows = json.loads((opened.path / "provenance.json").read_text())["starts"]
        assert all({"time", "threads", "torch", "lather"} <= set(row) for row in rows)
        return [(row["step"], row.get("ranks", "")) for row in rows]

    assert [step for step, _ in starts()] == [0]
    for step, ranks, expected in (
        (300, "1 rank", [(300, "1 rank")]),
        (600, "4 ranks", [(300, "1 rank"), (600, "4 ranks")]),
        (600, "8 ranks", [(300, "1 rank"), (600, "8 ranks")]),
        (450, "2 ranks", [(300, "1 rank"), (450, "2 ranks")]),
    ):
        opened.start = replace(opened.start, step=step, is_new=False)
        opened.record(make_data("books-1"), {"ranks": ranks})
        assert [start for start in starts() if start[0] >= 300] == expected


def test_the_same_tokens_in_another_place_are_taken(
    opened: RunDirectory, make_data: MakeData
) -> None:
    opened.record(replace(make_data("books-1"), identities={"elsewhere": "identity of books-1"}))
    record = json.loads((opened.path / "provenance.json").read_text())
    assert record["data"] == [["elsewhere", "identity of books-1"]]


@pytest.mark.parametrize("tokenizer", ["there", "lost"])
def test_another_data_set_is_refused_by_both_names(
    opened: RunDirectory, make_data: MakeData, tokenizer: str
) -> None:
    if tokenizer == "lost":
        (opened.path / "tokenizer.json").unlink()
    with nothing_changes(opened.path), pytest.raises(RunError) as caught:
        opened.record(make_data("books-2"))
    assert re.search(
        r"was trained on other tokens \(.*books-1\) than it has now \(.*books-2\): .*give another "
        r"--run-dir",
        str(caught.value),
    )


def test_a_lost_tokenizer_comes_back_from_the_same_data_set(
    opened: RunDirectory, make_data: MakeData
) -> None:
    (opened.path / "tokenizer.json").unlink()
    opened.record(make_data("books-1"))
    assert (opened.path / "tokenizer.json").read_text() == "tokenizer of books-1"


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"commit": null}',
        b'{"data": 3}',
        b'{"data": [["a", "b"]]}',
    ],
)
def test_a_damaged_record_is_named(
    opened: RunDirectory, make_data: MakeData, contents: bytes
) -> None:
    (opened.path / "provenance.json").write_bytes(contents)
    with pytest.raises(RunError, match=r"provenance\.json: damaged: delete "):
        opened.record(make_data("books-1"))
