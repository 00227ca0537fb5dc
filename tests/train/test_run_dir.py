"""The run directory has one owner, one configuration and one data set; whoever is refused changes
nothing."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lather.config.config import Config
from lather.config.optim import optim_config
from lather.config.toml_file import load_config
from lather.data.batch_sizes import BatchSizes
from lather.data.batches import Batches
from lather.data.order import Order
from lather.errors import ConfigError, RunError
from lather.train.run_dir import RunData, RunDirectory

MakeConfig = Callable[..., Config]


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
    (folder / "tokenizer.json").write_text("precious")
    with nothing_changes(folder):
        message = refusal(config)
    assert re.match(
        r"run_dir = .* holds files but no config\.toml.* give another --run-dir", message
    )


@pytest.mark.parametrize("contents", [b"", b"[train", b"\xff\xfe", b"unknown = 1\n"])
def test_a_damaged_configuration_is_named_with_the_remedy(
    config: Config, begun: Path, contents: bytes
) -> None:
    (begun / "config.toml").write_bytes(contents)
    with nothing_changes(begun), pytest.raises((ConfigError, RunError), match=r"run.*--run-dir"):
        RunDirectory(config)


@pytest.mark.parametrize("below", ["", "/run/deeper"])
def test_a_path_that_is_or_leads_through_a_file_is_refused(
    make_config: MakeConfig, tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("precious")
    with nothing_changes(tmp_path):
        message = refusal(make_config(run_dir=f"{tmp_path / 'file'}{below}"))
    assert re.match(r"run_dir = .*file.* cannot be written \(.*\): give another --run-dir", message)


# --- who is writing it ----------------------------------------------------------------------------


def test_a_run_that_is_open_is_refused_until_it_is_closed(
    config: Config, make_config: MakeConfig
) -> None:
    first = RunDirectory(config)
    with nothing_changes(first.path):
        message = refusal(config)
    assert re.match(
        r"run_dir = .* is in use by another process: wait for it, or give another --run-dir",
        message,
    )
    first.close()
    refusal(make_config(seed=1))  # it does not hold the run
    RunDirectory(config).close()


def test_a_run_notices_that_its_folder_is_not_its_own_any_more(config: Config) -> None:
    first = RunDirectory(config)
    first.check_in_place()
    (first.path / ".lock").unlink()  # harmless as long as no other process begins
    first.check_in_place()
    shutil.rmtree(first.path)
    with pytest.raises(RunError, match="was deleted or moved while this process trained there"):
        first.check_in_place()
    second = RunDirectory(config)
    with pytest.raises(RunError, match="was deleted or moved"):
        first.check_in_place()
    second.check_in_place()
    second.close()


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
            Batches([], Order([1], 0), BatchSizes(1)),
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


def test_what_does_not_touch_the_numbers_may_change_and_a_run_may_move(
    make_config: MakeConfig, opened: RunDirectory, make_data: MakeData, tmp_path: Path
) -> None:
    opened.close()
    opened.path.rename(tmp_path / "moved")
    changed = make_config(
        run_dir=str(tmp_path / "moved"),
        checkpoint={"every": 3, "keep_last": 9},
        log={"tensorboard": True, "sample_prompt": "日本"},
        train={"micro_batch_size": 1, "device": "auto", "recompute": ["attention"]},
        moe={"memory": "recompute"},
    )
    again = RunDirectory(changed)
    again.record(make_data("books-1"))
    again.close()
    assert load_config(again.path / "config.toml") == changed.resolved()
    assert again.start.changes == ""
    assert not (again.path / "changes.jsonl").exists()


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


@pytest.mark.parametrize("content", ["{", "[]", '{"starts": []}'])
def test_a_damaged_record_is_named_and_nothing_changes(
    opened: RunDirectory, make_data: MakeData, content: str
) -> None:
    opened.record(make_data("books-1"))
    (opened.path / "provenance.json").write_text(content)
    with nothing_changes(opened.path), pytest.raises(RunError, match=r"provenance\.json: damaged"):
        opened.record(make_data("books-1"))
    (opened.path / "provenance.json").unlink()  # as the message says
    opened.record(make_data("books-1"))


def test_the_same_tokens_in_another_place_are_taken(
    opened: RunDirectory, make_data: MakeData
) -> None:
    opened.record(replace(make_data("books-1"), identities={"elsewhere": "identity of books-1"}))
    record = json.loads((opened.path / "provenance.json").read_text())
    assert record["data"] == [["elsewhere", "identity of books-1"]]


def test_another_data_set_is_refused_by_both_names(
    opened: RunDirectory, make_data: MakeData
) -> None:
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
