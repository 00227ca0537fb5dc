"""`lather import ORG/NAME` from a stand-in hub, with the real `huggingface_hub`."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest

from forked import ForkedPython
from lather.cli import main
from lather.data.documents import train_tokenizer
from lather.data.recipe import END_OF_TEXT
from lather.hub import TOOLS_TEMPLATE_FILE
from lather.models.hf.model_export import save_hugging_face
from models.tiny import tiny_config, tiny_model
from stand_in_hub import TOKEN, Hub, files_of, serve, stand_in_hub
from tiny_run import write_config

Lather = Callable[..., str]
WEIGHTS = "checkpoints/step-00000000/rank-00000.safetensors"
DECOYS = {
    "README.md": b"# A model",
    "pytorch_model.bin": b"pickle" * 500,
    "original/consolidated.00.pth": b"pickle" * 500,
    "consolidated.safetensors": b"again" * 500,
    "onnx/model.onnx": b"another format" * 500,
    "tokenizer_of_others.json": b"{}",
}
"""Files of a repository that no import needs."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of several shards, with a tokenizer."""
    folder = tmp_path_factory.mktemp("published")
    model, config = tiny_model(vocab_size=300), tiny_config(vocab_size=300)
    save_hugging_face(model, config, folder, max_shard_bytes=20_000)
    train_tokenizer(iter(["def f(x): return x\n"] * 9), 300, END_OF_TEXT).save(
        str(folder / "tokenizer.json")
    )
    (folder / TOOLS_TEMPLATE_FILE).parent.mkdir()
    (folder / TOOLS_TEMPLATE_FILE).write_text("{{ tools }}")
    return folder


@pytest.fixture(scope="module")
def weights(published: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run that was imported from the folder itself."""
    run = tmp_path_factory.mktemp("imported") / "run"
    assert main(["import", str(published), str(run)]) == 0
    return (run / WEIGHTS).read_bytes()


@pytest.fixture
def hub(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model as org/tiny."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with stand_in_hub(tmp_path / "home") as hub:
        hub.add("model", "org/tiny", {**files_of(published), **DECOYS})
        yield hub


def origin(run: Path) -> str:
    return str(json.loads((run / "huggingface/origin.json").read_text())["address"])


def test_a_model_is_imported_by_name_from_the_files_that_are_needed(
    hub: Hub, published: Path, weights: bytes, lather: Lather
) -> None:
    printed = lather("import", "org/tiny", "run")
    commit = hub.repositories["model", "org/tiny"].refs["main"]
    assert f"from              hf://org/tiny@{commit}\n" in printed
    assert origin(Path("run")) == f"hf://org/tiny@{commit}"
    assert Path("run", WEIGHTS).read_bytes() == weights
    assert len(list(published.glob("*.safetensors"))) > 3
    assert hub.downloads() == sorted(files_of(published))
    assert Path("run/huggingface", TOOLS_TEMPLATE_FILE).is_file()
    assert lather("generate", "run", "--prompt", "def f", "--tokens", 3).startswith("def f")


def test_adapters_of_an_imported_run_name_the_repository(hub: Hub, lather: Lather) -> None:
    lather("import", "org/tiny", "base")
    small = "--train.steps 1 --train.batch-size 2 --train.sequence-length 16 --lora.rank 2"
    text = write_config(Path()).parent / "corpus"
    lather(
        "train",
        "--init-from base --run-dir run --data.tokenizer base/tokenizer.json",
        small,
        "--data.source",
        text,
    )
    lather("export", "run", "adapter", "--adapter")
    settings = json.loads(Path("adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/tiny"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_shown_on_a_terminal_alone(
    is_terminal: bool, hub: Hub, lather: Lather, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = importlib.import_module("huggingface_hub.utils.tqdm")
    monkeypatch.setattr(bars, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    monkeypatch.setattr(bars, "progress_bar_states", {})
    bars.enable_progress_bars()
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        lather("import", "org/tiny", "run")
    assert ("Fetching" in stderr.getvalue()) == is_terminal
    assert is_terminal or not stderr.getvalue()
    assert not bars.are_progress_bars_disabled()


def test_a_single_file_goes_before_shards(hub: Hub, weights: bytes, lather: Lather) -> None:
    model, config = tiny_model(vocab_size=300), tiny_config(vocab_size=300)
    save_hugging_face(model, config, "one")
    hub.add("model", "org/one", files_of(Path("one")) | DECOYS)
    lather("import", "hf://org/one", "run")
    assert hub.downloads() == ["config.json", "model.safetensors"]
    assert Path("run", WEIGHTS).read_bytes() == weights


def test_a_revision_is_a_branch_a_tag_or_a_commit(
    hub: Hub, published: Path, lather: Lather
) -> None:
    stored = hub.repositories["model", "org/tiny"]
    first, files = stored.refs["main"], files_of(published)
    on_branch = stored.commit({**files, "merges.txt": b"on a branch"}, "try/1")
    second = stored.commit({**files, "merges.txt": b"newer"})
    for number, (words, commit) in enumerate(
        {
            ("org/tiny",): second,
            (f"org/tiny@{first}",): first,
            ("org/tiny", "--revision", "try/1"): on_branch,
            ("hf://org/tiny@try%2F1",): on_branch,
        }.items()
    ):
        lather("import", words[0], f"run{number}", *words[1:])
        assert origin(Path(f"run{number}")) == f"hf://org/tiny@{commit}"
    hub.requests.clear()
    lather("import", "org/tiny", "again")
    assert hub.downloads() == []


def test_two_revisions_are_refused(hub: Hub, lather: Lather) -> None:
    error = lather("import", "org/tiny@main", "run", "--revision", "other", status=2)
    assert "org/tiny@main names a revision, and so does --revision other: give one of" in error
    assert not hub.requests


def test_a_run_that_exists_is_refused_before_the_download(hub: Hub, lather: Lather) -> None:
    Path("run").mkdir()
    Path("run/notes.txt").touch()
    error = lather("import", "org/tiny", "run", status=2)
    assert "run: exists already and is not an empty folder: give another place" in error
    assert not hub.requests


@pytest.fixture
def shard(hub: Hub) -> str:
    """The name of one of the model's shards."""
    stored = hub.repositories["model", "org/tiny"]
    return next(name for name in stored.commits[stored.refs["main"]] if name.startswith("model-"))


def test_a_download_that_breaks_is_resumed(
    hub: Hub, shard: str, weights: bytes, lather: Lather
) -> None:
    hub.breaks[shard] = [5000]
    lather("import", "org/tiny", "run")
    ranges = [range_ for _, path, range_, _ in hub.requests if path == f"/cdn/{shard}"]
    assert ranges == ["", "bytes=5000-"]
    assert Path("run", WEIGHTS).read_bytes() == weights


def test_a_stopped_import_goes_on_with_the_missing_files(
    hub: Hub, shard: str, weights: bytes, lather: Lather, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.breaks[shard] = [0] * 6
    command = [sys.executable, "-m", "lather", "import", "org/tiny", "run"]
    assert main(command[3:]) == 2
    assert not Path("run").exists()
    hub.requests.clear()
    lather("import", "org/tiny", "run")
    assert shard in hub.downloads()
    assert len(hub.downloads()) < len(files_of(Path("run"))) + 3
    assert Path("run", WEIGHTS).read_bytes() == weights


def test_without_a_connection_the_cache_is_read(
    hub: Hub, weights: bytes, lather: Lather, monkeypatch: pytest.MonkeyPatch
) -> None:
    lather("import", "org/tiny", "first")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    lather("import", "org/tiny", "second")
    assert origin(Path("first")) == origin(Path("second"))
    assert Path("second", WEIGHTS).read_bytes() == weights
    error = lather("import", "org/other", "third", status=2)
    assert "hf://org/other: HF_HUB_OFFLINE is set, and it is not (all) in " in error
    assert not hub.requests


def test_a_cache_that_lacks_a_file_is_refused_offline(
    hub: Hub, shard: str, lather: Lather, monkeypatch: pytest.MonkeyPatch
) -> None:
    lather("import", "org/tiny", "first")
    (cached,) = Path(huggingface_hub.constants.HF_HUB_CACHE).rglob(shard)
    cached.unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    error = lather("import", "org/tiny", "second", status=2)
    assert "HF_HUB_OFFLINE is set, and it is not (all) in " in error
    assert not Path("second").exists()


def test_the_token_opens_repositories_and_is_written_nowhere(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("is_private", "is_gated"):
        files = hub.repositories["model", "org/tiny"].commits.values()
        hub.add("model", f"org/{name}", next(iter(files)), **{name: True})
    assert main(["import", "org/is_private", "without"]) == 2
    assert main(["import", "org/is_gated", "without"]) == 2
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.breaks["config.json"] = [0] * 6
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert main(["import", "org/is_private", "run0"]) == 2
    assert main(["import", "org/is_private", "run0"]) == 0
    assert main(["import", "org/is_gated", "run1"]) == 0
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}/expired")
    assert main(["import", "org/is_private", "run2"]) == 2
    printed = "".join(capfd.readouterr())
    assert "there is no such model, or it is private" in printed
    assert "gated: accept its terms at the hub" in printed
    assert TOKEN not in printed
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert not any(has_token for _, path, _, has_token in hub.requests if path.startswith("/cdn/"))


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "org/none": "org/none: no such folder here, and hf://org/none: there is no such model, or",
        "org/tiny@v9": "hf://org/tiny@v9: has no revision 'v9': give a branch, a tag or a whole",
        "org/a--b": "hf://org/a--b: no name that a hub may have: give ORG/NAME",
        "tiny": "tiny: neither a folder nor the name of a model: give a folder with config.json",
        "org/tiny/sub/dir": "of a hub, without a path (--revision for a branch with a slash)",
        "hf://org/tiny@main/sub": "hf://org/tiny@main/sub: neither a folder nor the name of a mod",
        "../tiny": "../tiny: neither a folder nor the name of a model",
        "org/..": "org/..: neither a folder nor the name of a model",
        "./tiny@main": "./tiny@main: neither a folder nor the name of a model",
        "hf://datasets/org/tiny": "neither a folder nor the name of a model",
        "org/empty": "has no config.json: give a model with config.json and safetensors",
        "org/pickled": "has no model.safetensors: give a model with config.json and safetensors",
        "org/other": "model_type = 'bert' is not",
    }.items(),
)
def test_what_cannot_be_imported_is_one_line(
    name: str, message: str, hub: Hub, lather: Lather
) -> None:
    stored = hub.repositories["model", "org/tiny"]
    files = stored.commits[stored.refs["main"]]
    hub.add("model", "org/empty", DECOYS)
    hub.add("model", "org/pickled", {"config.json": files["config.json"], **DECOYS})
    hub.add("model", "org/other", {**files, "config.json": b'{"model_type": "bert"}'})
    assert message in lather("import", name, "run", status=2)
    assert not Path("run").exists()
    assert not [file for file in hub.downloads() if file.endswith(".safetensors")]


OF_MINE = """
from dataclasses import dataclass, replace
from lather.models.families import deepseek_v2

@dataclass(frozen=True)
class OfMineConfig(deepseek_v2.DeepseekV2Config):
    model_type: str = "of_mine"

FAMILY = replace(deepseek_v2.FAMILY, config=OfMineConfig)
"""
"""A module with a family that is published as of_mine."""


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"final_logit_softcapping": 30.0},
            ["--ignore-fields", "final_logit_softcapping"],
            "final_logit_softcapping = 30.0 is not supported",
        ),
        (
            {"model_type": "of_mine"},
            ["--model-type", "family_of_this_test:FAMILY"],
            "model_type = 'of_mine' is not supported",
        ),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) else "",
)
def test_the_options_of_reading_hold_for_a_model_of_a_hub(
    change: dict[str, object],
    options: list[str],
    message: str,
    hub: Hub,
    weights: bytes,
    lather: Lather,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("family_of_this_test.py").write_text(OF_MINE)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    stored = hub.repositories["model", "org/tiny"]
    files = stored.commits[stored.refs["main"]]
    config = json.dumps(json.loads(files["config.json"]) | change).encode()
    hub.add("model", "org/other", {**files, "config.json": config})
    assert message in lather("import", "org/other", "run", status=2)
    lather("import", "org/other", "run", *options)
    assert Path("run", WEIGHTS).read_bytes() == weights


def test_a_hub_that_is_not_there_is_one_line(
    hub: Hub, lather: Lather, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://user:secret@127.0.0.1:9")
    error = lather("import", "org/tiny", "run", status=2)
    assert "hf://org/tiny: the download from 127.0.0.1:9 failed (" in error
    assert "secret" not in error


def test_a_folder_goes_before_a_repository_of_its_name(
    hub: Hub, published: Path, lather: Lather
) -> None:
    shutil.copytree(published, "org/tiny")
    printed = lather("import", "org/tiny", "run")
    assert "org/tiny is a folder here; hf://org/tiny is the hub's model" in printed
    assert not hub.requests
    assert not Path("run/huggingface/origin.json").exists()
    error = lather("import", "org/tiny", "other", "--revision", "main", status=2)
    assert "--revision main applies to a model of a hub, but org/tiny is a folder here" in error
    lather("import", "hf://org/tiny", "other")
    assert hub.requests


def test_the_disk_is_looked_at_first(
    hub: Hub, published: Path, lather: Lather, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    error = lather("import", "org/tiny", "run", status=2)
    assert " and the run: needs 0." in error
    assert "where 0.00 GB are free: free some space, or use another disk" in error
    assert not [file for file in hub.downloads() if file.endswith(".safetensors")]


def test_a_missing_library_is_named(
    hub: Hub, lather: Lather, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = lather("import", "org/tiny", "run", status=2)
    assert "huggingface_hub is needed to read from a hub, and is not installed" in error


def test_the_variables_of_the_library_hold_in_a_process_of_its_own(
    published: Path, weights: bytes, tmp_path: Path
) -> None:
    with serve() as hub:
        hub.add("model", "org/tiny", files_of(published) | DECOYS, is_private=True)
        variables = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-m", "lather", "import", "org/tiny", str(tmp_path / "run")]
        process = ForkedPython(
            command[1:],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == weights
    assert (tmp_path / "home/hub/models--org--tiny").is_dir()
    assert TOKEN not in out + err
