"""Saving beside training: the state on disk is that of the step, however long writing takes, and
errors are not lost."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_boundary import Stream, UnorderedError, Watch, crossing
from stored import bytes_by_file, same_bits, stored_tensors
from torch import nn

from lather.checkpoint import save as checkpoint_save
from lather.checkpoint.folder import Progress, Retention, list_checkpoints
from lather.checkpoint.save import Saver, Staging, save_checkpoint
from lather.checkpoint.state import TrainingState
from lather.config.config import Config
from lather.optim import AdamW
from lather.train.display import PlainDisplay
from lather.train.diverged import DivergedError
from lather.train.loop import train


class Trainee:
    """A small model that AdamW trains on noise."""

    def __init__(self, **options: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1, bias=False))
        self.optimizer = AdamW(self.model.parameters(), lr=0.1, **options)
        self.state = TrainingState.of_model(self.model, self.optimizer)

    def train(self) -> None:
        self.model(torch.randn(3, 7, generator=self.generator)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saver(self, folder: Path, *, keep_last: int = 9) -> Saver:
        return Saver(folder, self.state, retention=Retention(keep_last), asynchronous=True)


class Gate:
    """Lets files be written once it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        write = checkpoint_save.write_safetensors

        def write_later(*args: Any) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            write(*args)

        monkeypatch.setattr(checkpoint_save, "write_safetensors", write_later)


@pytest.fixture
def trainee() -> Trainee:
    torch.manual_seed(3)
    trainee = Trainee()
    trainee.train()
    return trainee


def test_what_is_written_is_the_state_at_the_step(
    trainee: Trainee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = save_checkpoint(
        tmp_path / "at once", Progress(1, 0.5), trainee.state, retention=Retention(1)
    )
    gate, saver = Gate(monkeypatch), trainee.saver(tmp_path / "beside")
    path = saver.save(Progress(1, 0.5))
    assert gate.reached.wait(60)
    trainee.train()
    torch.rand(3)
    assert list_checkpoints(tmp_path / "beside") == []
    gate.opened.set()
    saver.wait()
    assert list_checkpoints(tmp_path / "beside") == [path]
    assert same_bits(path, expected)
    assert stored_tensors(path, random=True)["random/cpu.0"].equal(
        stored_tensors(expected, random=True)["random/cpu.0"]
    )
    assert (path / "state.json").read_text() == (expected / "state.json").read_text()
    trained = save_checkpoint(
        tmp_path / "at once", Progress(2, 0.5), trainee.state, retention=Retention(1)
    )
    assert not same_bits(path, trained)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Offloaded state behind the pretended boundary, which watches the copies of a save, too."""
    copy = Staging.copy
    with crossing(monkeypatch) as boundary:

        def watched_copy(staging: Staging, values: Any) -> Any:
            with Watch(boundary):
                return copy(staging, values)

        monkeypatch.setattr(Staging, "copy", watched_copy)
        yield


@pytest.mark.usefixtures("watched")
def test_offloaded_state_is_that_of_the_step_while_later_steps_write_it(
    trainee: Trainee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress(1, 0.5)
    expected = save_checkpoint(
        tmp_path / "at once", progress, trainee.state, retention=Retention(1)
    )
    torch.manual_seed(3)
    offloaded = Trainee(offload=True)
    offloaded.train()
    gate, saver = Gate(monkeypatch), offloaded.saver(tmp_path / "beside")
    path = saver.save(progress)
    assert gate.reached.wait(60)
    for _ in range(2):
        offloaded.train()
    gate.opened.set()
    saver.wait()
    assert same_bits(path, expected)


@pytest.mark.usefixtures("watched")
def test_a_save_waits_until_offloaded_state_has_been_written_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded = Trainee(offload=True)
    offloaded.train()
    monkeypatch.setattr(Stream, "synchronize", lambda _: None)
    saver = offloaded.saver(tmp_path)
    saver.save(Progress(1, 0.5))
    with pytest.raises(UnorderedError):
        saver.wait()


def test_the_next_save_waits_for_the_one_before(
    trainee: Trainee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, saver = Gate(monkeypatch), trainee.saver(tmp_path, keep_last=2)
    first = saver.save(Progress(1, 0.5))
    threading.Timer(0.2, gate.opened.set).start()
    second = saver.save(Progress(2, 0.5))
    assert list_checkpoints(tmp_path)[0] == first
    third = saver.save(Progress(3, 0.5))
    # it is there already, and the step decides its contents
    assert saver.save(Progress(3, 0.5)) == third
    saver.wait()
    assert list_checkpoints(tmp_path) == [second, third]


def test_the_copy_is_as_large_as_what_is_written_and_is_used_again(
    trainee: Trainee, tmp_path: Path
) -> None:
    saver = trainee.saver(tmp_path)
    saver.save(Progress(1, 0.5))
    saver.wait()
    copies = dict(saver.staging._copies)
    trainee.train()
    path = saver.save(Progress(2, 0.5))
    saver.wait()
    assert sum(copy.nbytes for copy in saver.staging._copies.values()) == sum(
        bytes_by_file(path).values()
    )
    assert all(saver.staging._copies[index] is copy for index, copy in copies.items())


@pytest.mark.parametrize("after", ["save", "wait"])
@pytest.mark.parametrize("where", ["write_safetensors", "sync"])
def test_an_error_is_raised_by_what_comes_next(
    where: str, after: str, trainee: Trainee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = trainee.saver(tmp_path)
    first = saver.save(Progress(1, 0.5))
    saver.wait()

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_save, where, fail)
        saver.save(Progress(2, 0.5))
        with pytest.raises(OSError, match=r"full|No space"):
            saver.wait() if after == "wait" else saver.save(Progress(3, 0.5))
    assert sorted(tmp_path.iterdir()) == [first]
    last = saver.save(Progress(4, 0.5))  # the error is raised once
    saver.wait()
    assert list_checkpoints(tmp_path) == [first, last]


def test_an_error_before_anything_was_copied_is_raised_too(
    trainee: Trainee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = trainee.saver(tmp_path / "a file" / "folder")
    (tmp_path / "a file").touch()
    saver.save(Progress(1, 0.5))
    with pytest.raises(OSError, match="a file"):
        saver.wait()


# --- whole runs -----------------------------------------------------------------------------------


def test_a_run_leaves_the_same_checkpoints_either_way(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    newest = []
    for asynchronous in (False, True):
        run_dir = tmp_path / f"run {asynchronous}"
        checkpoint = {"every": 1, "keep_last": 2, "asynchronous": asynchronous}
        outcome = train(make_config(run_dir=str(run_dir), checkpoint=checkpoint), PlainDisplay(100))
        assert outcome.sample
        names = [path.name for path in list_checkpoints(run_dir / "checkpoints")]
        assert names == ["step-00000003", "step-00000004"]
        newest.append(outcome.checkpoint)
    assert same_bits(*newest)


def test_a_run_that_diverges_has_its_last_checkpoint(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    config = make_config(
        optim={"lr": 1e30, "warmup_steps": 0},
        train={"steps": 9, "max_skipped_steps": 2, "max_grad_norm": 0.0},
        checkpoint={"every": 1, "asynchronous": True},
        log={"sample_tokens": 0},
    )
    threading.Timer(1.0, gate.opened.set).start()
    with pytest.raises(DivergedError):
        train(config, PlainDisplay(100))
    names = [path.name for path in (Path(config.run_dir) / "checkpoints").iterdir()]
    assert names
    assert not any(name.startswith(".tmp") for name in names)
