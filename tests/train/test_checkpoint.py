"""Checkpoints: the same bits come back, a save that fails anywhere loses nothing, and damage is
reported by file name."""

import contextlib
import errno
import itertools
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lather.checkpoint import folder as checkpoint_folder
from lather.checkpoint import save as checkpoint_save
from lather.checkpoint.folder import Progress, Retention, list_checkpoints, step_of
from lather.checkpoint.reader import load_checkpoint, open_checkpoint
from lather.checkpoint.save import save_checkpoint
from lather.checkpoint.state import TrainingState
from lather.config.config import MoEConfig
from lather.config.optim import optim_config
from lather.data.batches import Batch
from lather.engine.optimizer import build_optimizer
from lather.errors import CheckpointError
from lather.files import digest_of, sha256
from lather.models.decoder import Decoder
from lather.models.families import build_model
from lather.models.families.deepseek_v2 import DeepseekV2Config
from train.tiny_steps import train_step

FILE = "rank-00000.safetensors"
"""The file that one process writes."""


class Trainee:
    """A model, its optimizer, and random text to train on; step n is the same for every trainee."""

    def __init__(self, model: Decoder, name: str, tokens: Callable[..., torch.Tensor]) -> None:
        self.model, self.tokens = model, tokens
        options = {"precondition_frequency": 2} if "soap" in name else {}
        self.optimizer = build_optimizer(optim_config(name, **options), model.named_parameters())
        moe = MoEConfig(balance_coefficient=0.01)
        self.step = train_step(model, self.optimizer, moe, max_grad_norm=1.0)
        self.state = TrainingState.of_model(model, self.optimizer)

    def train(self, *steps: int) -> "Trainee":
        for step in steps:
            assert not self.step(Batch.of_tokens(self.tokens(step)), 1e-2).skipped
        return self

    def save(self, folder: Path, step: int, keep_last: int = 2) -> Path:
        return save_checkpoint(
            folder, Progress(step, 0.5 * step), self.state, retention=Retention(keep_last)
        )

    def load(self, path: Path) -> Progress:
        return load_checkpoint(path, self.state)

    def refusal(self, path: Path) -> str | None:
        """Say why the checkpoint is not loaded; None if it is loaded."""
        try:
            self.load(path)
        except CheckpointError as error:
            return str(error)
        return None

    def snapshot(self) -> dict[str, tuple[torch.dtype, bytes]]:
        """Return the bits of weights and optimizer state."""
        pieces = (*self.state.weights(), *self.state.optimizer_state())
        return {
            piece.name: (
                piece.value.dtype,
                piece.value.flatten().view(torch.uint8).numpy().tobytes(),
            )
            for piece in pieces
        }


MakeTrainee = Callable[..., Trainee]


@pytest.fixture(scope="module")
def trainee(make_model: Callable[..., Decoder], tokens: Callable[..., torch.Tensor]) -> MakeTrainee:
    def make(seed: int = 0, name: str = "soap", dtype: torch.dtype = torch.float32) -> Trainee:
        return Trainee(make_model(seed, dtype), name, tokens)

    return make


@pytest.fixture(scope="module")
def trained(trainee: MakeTrainee) -> Trainee:
    """A trainee after two steps, which tests must not change."""
    return trainee().train(1, 2)


@pytest.fixture(scope="module")
def victim(trainee: MakeTrainee) -> Trainee:
    return trainee(seed=1).train(1)


@pytest.fixture
def saved(trained: Trainee, tmp_path: Path) -> Path:
    """The checkpoint of a SOAP run after two steps."""
    return trained.save(tmp_path / "checkpoints", 2)


@pytest.fixture
def refused(victim: Trainee) -> Iterator[Callable[[Path], str]]:
    """A function that loads a checkpoint which must be refused, and returns the message; the
    trainee must not change."""
    before = victim.snapshot()

    def refuse(path: Path) -> str:
        message = victim.refusal(path)
        assert message is not None
        return message

    yield refuse
    assert victim.snapshot() == before


def rewrite(path: Path, **changes: Any) -> None:
    """Replace entries of `state.json` on purpose, so that its digest is right."""
    state = {**json.loads((path / "state.json").read_text()), **changes}
    del state["digest"]
    (path / "state.json").write_text(json.dumps({**state, "digest": digest_of(state)}))


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["soap", "adamw", "muon", "soap_muon"])
def test_a_loaded_run_goes_on_with_the_same_bits(
    trainee: MakeTrainee, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    original, loaded = trainee(0, name, dtype), trainee(1, name, dtype)
    original.train(1, 2, 3)
    progress = loaded.load(original.save(tmp_path, 3))
    assert progress == Progress(3, 1.5)
    assert loaded.snapshot() == original.snapshot()
    original.train(4, 5, 6, 7)
    loaded.train(4, 5, 6, 7)
    assert loaded.snapshot() == original.snapshot()
    if "soap" in name:
        assert loaded.optimizer.counters["refreshes_done"] > 0
        dtypes = {
            dtype
            for key, (dtype, _) in loaded.snapshot().items()
            if "/factor" in key or "/basis" in key
        }
        assert dtypes == {torch.float32}


def test_a_trained_optimizer_is_overwritten_whole(trainee: MakeTrainee, saved: Path) -> None:
    other, fresh = trainee(1), trainee(2)
    other.train(5, 6, 7)
    other.load(saved)
    fresh.load(saved)
    assert other.snapshot() == fresh.snapshot()


def test_progress_comes_back(trained: Trainee, victim: Trainee, tmp_path: Path) -> None:
    progress = Progress(7, 12.25, skipped_in_a_row=3)
    path = save_checkpoint(tmp_path, progress, trained.state, retention=Retention(1))
    assert victim.load(path) == progress


def test_weights_load_without_an_optimizer(trainee: MakeTrainee, saved: Path) -> None:
    other = trainee(1)
    load_checkpoint(saved, TrainingState.of_model(other.model))
    stored = open_checkpoint(saved)
    assert all(piece.value.equal(stored.read(piece.name)) for piece in other.state.weights())
    assert not list(other.state.optimizer_state())


# --- complete or absent ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retention", "steps"),
    [
        (Retention(1), [10]),
        (Retention(3), [8, 9, 10]),
        (Retention(1, every=4), [4, 8, 10]),
        (Retention(2, every=10), [9, 10]),
        (Retention(1, best=3), [3, 10]),
        (Retention(1, every=5, best=5), [5, 10]),
        (Retention(2, best=10), [9, 10]),
    ],
)
def test_the_newest_every_nth_and_the_best_are_kept(
    trained: Trainee, tmp_path: Path, retention: Retention, steps: list[int]
) -> None:
    for step in range(1, 11):
        save_checkpoint(tmp_path, Progress(step, 0.0), trained.state, retention=retention)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == steps
    assert sorted(tmp_path.iterdir()) == list_checkpoints(tmp_path)


def test_a_step_that_is_there_is_not_saved_again(trainee: MakeTrainee, saved: Path) -> None:
    before = {path: path.read_bytes() for path in saved.iterdir()}
    assert trainee(1).save(saved.parent, 2) == saved
    assert {path: path.read_bytes() for path in saved.iterdir()} == before


CALL_SITES: dict[str, tuple[Any, str]] = {
    "write_safetensors": (checkpoint_save, "write_safetensors"),
    "sync": (checkpoint_save, "sync"),
    "rename": (Path, "rename"),
    "write_text": (Path, "write_text"),
    "mkdir": (Path, "mkdir"),
    "rmtree": (shutil, "rmtree"),
}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("site", CALL_SITES)
def test_a_save_that_fails_anywhere_loses_nothing(
    trained: Trainee, victim: Trainee, tmp_path: Path, site: str, moment: str
) -> None:
    """Each call of a function fails in turn, before or after it has done its work, until a save
    succeeds."""
    owner, name = CALL_SITES[site]
    original = getattr(owner, name)
    for step in (1, 2):
        trained.save(tmp_path / "begun", step)
    for failing in itertools.count():
        folder = tmp_path / str(failing)
        shutil.copytree(tmp_path / "begun", folder)
        calls = itertools.count()

        def fail(
            *args: Any, calls: Iterator[int] = calls, failing: int = failing, **kwargs: Any
        ) -> Any:
            is_the_one = next(calls) == failing
            result = None if is_the_one and moment == "before" else original(*args, **kwargs)
            if is_the_one:
                raise OSError("the disk is full")
            return result

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(OSError):
            patch.setattr(owner, name, fail)
            trained.save(folder, 3)
            break
        assert "step-00000002" in [path.name for path in list_checkpoints(folder)]
        for path in list_checkpoints(folder):
            assert path.name == f"step-{victim.load(path).step:08d}"
        newest = trained.save(folder, 4)
        assert list_checkpoints(folder)[-1] == newest
        assert sorted(folder.iterdir()) == list_checkpoints(folder)
    assert failing >= 1


def test_an_old_checkpoint_is_not_left_half_deleted(
    trained: Trainee, victim: Trainee, tmp_path: Path
) -> None:
    def delete_one_file(folder: Path) -> None:
        (folder / FILE).unlink()
        raise OSError("the process is killed")

    trained.save(tmp_path, 1, keep_last=1)
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(shutil, "rmtree", delete_one_file)
        trained.save(tmp_path, 2, keep_last=1)
    assert [victim.load(path).step for path in list_checkpoints(tmp_path)] == [2]


def test_everything_is_on_disk_before_it_has_its_name(
    trained: Trainee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(path: Path) -> None:
        synced.append(path.name)
        assert (tmp_path / "step-00000003").exists() == (path == tmp_path)

    written: list[int] = []
    for module in (checkpoint_save, checkpoint_folder):
        monkeypatch.setattr(module, "sync", note)
    monkeypatch.setattr(os, "fsync", written.append)
    trained.save(tmp_path, 3)
    assert len(written) == 1  # the tensors' file, synced by its writer
    assert set(synced) == {"state.json", ".tmp-step-00000003", tmp_path.name, tmp_path.parent.name}
    assert synced[-1] == tmp_path.name


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 100, -1])
def test_a_flipped_byte_in_the_tensors_is_named(
    saved: Path, refused: Callable[[Path], str], position: int
) -> None:
    data = bytearray((saved / FILE).read_bytes())
    data[position] ^= 1
    (saved / FILE).write_bytes(data)
    assert re.match(rf"{saved / FILE}: .*delete {saved}", refused(saved))


def test_a_flipped_byte_anywhere_in_the_state_is_noticed(saved: Path, victim: Trainee) -> None:
    intact, unnoticed = (saved / "state.json").read_bytes(), []
    end = len(intact)
    for position in (*range(0, 600, 5), *range(600, end, 197), *range(end - 100, end, 3)):
        damaged = bytearray(intact)
        damaged[position] ^= 1
        (saved / "state.json").write_bytes(damaged)
        before, message = victim.snapshot(), victim.refusal(saved)
        if message is None:
            unnoticed.append(intact[max(0, position - 12) : position + 1])
        else:
            assert re.match(rf"{saved}/.*delete {saved}", message)
            assert victim.snapshot() == before
    assert unnoticed == []


STATES = (
    *(b"[]", b"{}", b"3", b"\xff\xfe", b'{"format": 3}', b"[" * 99999),
    b'{"format": 3, "step": 2, "seconds": 1.0, "files": {}}',
)


@pytest.mark.parametrize(
    ("file", "contents"),
    [
        *((FILE, contents) for contents in (None, b"", "truncated", "folder")),
        *(("state.json", contents) for contents in (None, b"", "truncated", "folder", *STATES)),
    ],
)
def test_a_damaged_file_is_named(
    saved: Path, refused: Callable[[Path], str], file: str, contents: bytes | str | None
) -> None:
    path = saved / file
    data = path.read_bytes()
    path.unlink()
    if contents == "folder":
        path.mkdir()
    elif contents is not None:
        path.write_bytes(data[:-1] if isinstance(contents, str) else contents)
    assert re.match(rf"{path}: missing or damaged.*delete {saved}", refused(saved), re.DOTALL)


@pytest.mark.parametrize("file", [FILE, "state.json"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOMEM])
def test_a_file_that_cannot_be_read_is_not_to_be_deleted(
    saved: Path,
    refused: Callable[[Path], str],
    file: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Path.open

    def open_others(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == file:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_others)
    message = refused(saved)
    assert message.startswith(f"{saved / file}: cannot be read ({os.strerror(number)}): ")
    assert "delete" not in message


@pytest.mark.parametrize("file", [FILE, "state.json"])
def test_a_pickle_is_refused_and_not_run(
    saved: Path, refused: Callable[[Path], str], file: str, tmp_path: Path
) -> None:
    class Malice:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "run",)

    (saved / file).write_bytes(pickle.dumps(Malice()))
    if file == FILE:
        size, checksum = (saved / FILE).stat().st_size, sha256(saved / FILE)
        rewrite(saved, files={FILE: {"bytes": size, "sha256": checksum}})
    message = refused(saved)
    assert message.startswith(f"{saved / file}: ")
    assert "refused" in message or "missing or damaged" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 24}, r"is \(264, 16\) F32, but the model's \(264, 24\)"),
        ({"num_hidden_layers": 3}, r"lacks 'layers\.2\."),
        ({"n_routed_experts": 5}, r"lacks 'layers\.1\.mlp\.experts\.down_proj\.4'"),
        ({"num_hidden_layers": 1}, r"has a surplus 'layers\.1\."),
        ({"tie_word_embeddings": False}, r"lacks 'lm_head\.weight'"),
    ],
)
def test_another_models_checkpoint_is_refused(
    model_config: DeepseekV2Config,
    saved: Path,
    change: dict[str, Any],
    reason: str,
    tokens: Callable[..., torch.Tensor],
) -> None:
    model = build_model(replace(model_config, **change), torch.Generator().manual_seed(5))
    other = Trainee(model, "soap", tokens)
    before = other.snapshot()
    with pytest.raises(
        CheckpointError, match=rf"state\.json: .*{reason}.*: use the configuration it was made with"
    ):
        other.load(saved)
    assert other.snapshot() == before


@pytest.mark.parametrize("had_state", [False, True])
def test_a_checkpoint_with_other_factors_is_refused(
    trainee: MakeTrainee, saved: Path, had_state: bool
) -> None:
    other = trainee(1)
    for group in other.optimizer.param_groups:
        group["max_precond_dim"] = min(group["max_precond_dim"], 12)
    other.train(*[1] * had_state)
    before = other.snapshot()
    with pytest.raises(
        CheckpointError,
        match=(
            r"state\.json: holds another optimizer's state \(.*/basis_0 is \(\d+, "
            r"\d+\) in the checkpoint and absent in this run"
        ),
    ):
        other.load(saved)
    assert other.snapshot() == before
    other.train(2)


def test_what_was_never_trained_starts_afresh(trainee: MakeTrainee, tmp_path: Path) -> None:
    """The checkpoint has no optimizer state, and is loaded over one that has."""
    for name in ("soap", "adamw"):
        original, loaded = trainee(0, name), trainee(1, name).train(1, 2)
        loaded.load(original.save(tmp_path / name, 0))
        original.train(3)
        loaded.train(3)
        assert loaded.snapshot() == original.snapshot()


def test_random_numbers_go_on(trainee: MakeTrainee, tmp_path: Path) -> None:
    original = trainee(0)
    path = original.save(tmp_path, 0)
    expected = torch.rand(5)
    torch.manual_seed(99)
    trainee(1).load(path)
    assert torch.rand(5).equal(expected)


def test_another_dtype_is_refused(trainee: MakeTrainee, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r" F32, but the model's .* F64"):
        trainee(dtype=torch.float64).load(saved)
