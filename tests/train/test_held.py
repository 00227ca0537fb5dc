"""A checkpoint that is being read stays, whatever its run deletes; and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lather.checkpoint.folder import checkpoint_path, list_checkpoints
from lather.checkpoint.held import PREFIX, held_checkpoint
from lather.errors import CheckpointError


def make_checkpoint(run: Path, step: int) -> Path:
    path = checkpoint_path(run / "checkpoints", step)
    path.mkdir(parents=True)
    for name in ("state.json", "rank-00000.safetensors"):
        (path / name).write_text(f"{name} of step {step}")
    return path


def newest(run: Path) -> Path:
    return list_checkpoints(run / "checkpoints")[-1]


def test_what_is_held_can_be_read_after_the_run_has_deleted_it(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, 3)
    with held_checkpoint(tmp_path, lambda: newest(tmp_path)) as held:
        assert held.name == made.name
        shutil.rmtree(made)
        make_checkpoint(tmp_path, 4)
        assert {file.name: file.read_text() for file in held.iterdir()} == {
            "state.json": "state.json of step 3",
            "rank-00000.safetensors": "rank-00000.safetensors of step 3",
        }
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_one_that_is_deleted_while_it_is_taken_is_passed_over(tmp_path: Path) -> None:
    """It is deleted before its first file is linked, or after."""
    first, second = make_checkpoint(tmp_path, 1), make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 3)
    order = iter([first, second, newest(tmp_path)])

    def choose() -> Path:
        chosen = next(order)
        if chosen == first:
            shutil.rmtree(chosen)
        if chosen == second:
            (chosen / "gone.safetensors").symlink_to("nowhere")
            os.link(chosen / "gone.safetensors", chosen / "other", follow_symlinks=False)
            shutil.rmtree(chosen)
        return chosen

    with held_checkpoint(tmp_path, choose) as held:
        assert held.name == "step-00000003"
        assert len(list(held.iterdir())) == 2
        assert [path.name for path in held.parent.iterdir()] == [held.name]


def test_a_run_that_deletes_them_all_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with (
        pytest.raises(
            CheckpointError, match=r"step-00000001: was deleted by its run before it could be read"
        ),
        held_checkpoint(tmp_path, lambda: checkpoint_path(tmp_path / "checkpoints", 1)),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_errors_name_the_checkpoint_and_not_where_it_is_held(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, 3)
    with (
        pytest.raises(CheckpointError, match=rf"^{made}/state\.json: damaged: delete {made}$"),
        held_checkpoint(tmp_path, lambda: made) as held,
    ):
        raise CheckpointError(f"{held}/state.json: damaged: delete {held}")


def test_without_links_it_is_read_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_checkpoint(tmp_path, 3)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        with held_checkpoint(tmp_path, lambda: made) as held:
            assert held == made
        patch.setattr("tempfile.mkdtemp", refuse)
        with held_checkpoint(tmp_path, lambda: made) as held:
            assert held == made
    assert (made / "state.json").exists()


def test_what_a_killed_reader_has_left_is_cleared_and_what_another_holds_is_not(
    tmp_path: Path,
) -> None:
    make_checkpoint(tmp_path, 3)
    script = f"""
import os, signal, sys
from pathlib import Path
from lather.checkpoint.held import held_checkpoint
run = Path({str(tmp_path)!r})
with held_checkpoint(run, lambda: run / "checkpoints/step-00000003"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(f"{PREFIX}*")
    os.utime(left, (0, 0))
    young = tmp_path / f"{PREFIX}young"
    young.mkdir()  # somebody made it who is about to lock it
    with held_checkpoint(tmp_path, lambda: newest(tmp_path)) as one:
        assert not left.exists()
        with held_checkpoint(tmp_path, lambda: newest(tmp_path)) as other:
            assert one != other
            assert one.exists()
    assert list(tmp_path.glob(f"{PREFIX}*")) == [young]
