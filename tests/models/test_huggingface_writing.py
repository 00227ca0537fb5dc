"""Writing Hugging Face folders: what is refused, and what an interruption leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lather.errors import ExchangeError
from lather.files import complete_folder
from lather.models.hf import safetensors_folder
from lather.models.hf.model_export import save_hugging_face
from lather.safetensors_file import write_safetensors
from models.tiny import tiny_config, tiny_model


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_hugging_face(tiny_model(), tiny_config(), folder, max_shard_bytes=30_000)
    return folder


def test_a_target_that_holds_something_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, words in {
        "out": "is not an empty folder",
        "file": "is not an empty folder",
        "file/below": "cannot be written",
    }.items():
        with pytest.raises(ExchangeError, match=f"{name}: .*{words}.*give another place"):
            save_hugging_face(tiny_model(), tiny_config(), tmp_path / name)
    assert (tmp_path / "out/mine").read_text() == (tmp_path / "file").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_an_empty_folder_and_one_below_folders_that_are_not_there_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty2")
    (tmp_path / "empty2").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for target in (tmp_path / "empty", tmp_path / "a/b/c", tmp_path / "link", Path()):
        save_hugging_face(tiny_model(), tiny_config(), target)
    for name in ("empty", "a/b/c", "empty2", "here"):
        assert {path.name for path in (tmp_path / name).iterdir()} == {
            "config.json",
            "model.safetensors",
        }
    assert not list(tmp_path.rglob(".tmp-*"))


def test_weights_of_another_configuration_are_not_written(tmp_path: Path) -> None:
    for changes in ({"vocab_size": 38}, {"num_hidden_layers": 4}, {"tie_word_embeddings": True}):
        with pytest.raises(ExchangeError, match="does not match the configuration"):
            save_hugging_face(tiny_model(), tiny_config(**changes), tmp_path / "out")
    with pytest.raises(ExchangeError, match="max_shard_bytes = 0 is not valid: give at least 1"):
        save_hugging_face(tiny_model(), tiny_config(), tmp_path / "out", max_shard_bytes=0)
    assert not list(tmp_path.iterdir())


def test_a_balancing_bias_is_not_left_out_silently(tmp_path: Path) -> None:
    model = tiny_model()
    for router in model.routers():
        router.enable_loss_free_balancing()
    with pytest.raises(
        ExchangeError,
        match=(
            r"'layers\.1\.mlp\.gate\.e_score_correction_bias' and 1 more "
            r".* cannot be exported.*bias_update_rate = 0"
        ),
    ):
        save_hugging_face(model, tiny_config(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_exception_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def fail_at_the_third(*arguments: Any) -> None:
        if len(written) == 2:
            raise RuntimeError("power cut")
        write_safetensors(*arguments)
        written.append(arguments[0])
        assert arguments[0].exists()
        assert not (tmp_path / "out").exists()

    monkeypatch.setattr(safetensors_folder, "write_safetensors", fail_at_the_third)
    with pytest.raises(RuntimeError, match="power cut"):
        save_hugging_face(tiny_model(), tiny_config(), tmp_path / "out", max_shard_bytes=30_000)
    assert len(written) == 2
    assert not list(tmp_path.iterdir())


KILLED_HALF_WAY = """
import os, signal, sys
from pathlib import Path
from lather.models.hf import model_export, safetensors_folder
from models.tiny import tiny_config, tiny_model
write = safetensors_folder.write_safetensors
def kill_at_the_second(file, *rest):
    if "00002" in file.name:
        file.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, *rest)
safetensors_folder.write_safetensors = kill_at_the_second
folder = Path(sys.argv[1])
model_export.save_hugging_face(tiny_model(), tiny_config(), folder, max_shard_bytes=30_000)
"""


def test_a_kill_half_way_leaves_no_folder_and_the_next_attempt_clears_up(
    tmp_path: Path, sharded: Path
) -> None:
    target, path = tmp_path / "out", [str(Path(__file__).parent.parent), *sys.path]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_HALF_WAY, str(target)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    assert len(list((tmp_path / ".tmp-out").iterdir())) == 2
    (tmp_path / ".tmp-out/of an earlier one").mkdir()
    (tmp_path / ".tmp-out/of an earlier one/x").write_text("x")
    save_hugging_face(tiny_model(), tiny_config(), target, max_shard_bytes=30_000)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == {
        p.name: p.read_bytes() for p in sharded.iterdir()
    }
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_writers_of_one_folder_do_not_meet(tmp_path: Path) -> None:
    with complete_folder(tmp_path / "out") as aside:
        (aside / "first").write_text("x")
        with pytest.raises(ExchangeError, match="out: another process is writing it"):
            save_hugging_face(tiny_model(), tiny_config(), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["first"]
