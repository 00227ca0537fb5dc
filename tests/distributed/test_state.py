"""Checkpoints know nothing of meshes: what any mesh saves is one process's file, and any mesh goes on from it.

One process trains two steps, saves, and trains three more. Every mesh loads its checkpoint, saves it again (the same bytes), trains the
same three steps, and saves; other meshes and one process load that.
"""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import Case, Pair, make_pair
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor

from lather.errors import CheckpointError
from lather.optim import SOAP, parameter_groups
from lather.train import checkpoint as checkpoint_module
from lather.train.checkpoint import FILES, Progress, load_checkpoint, load_parameters, save_checkpoint
from lather.train.config import OptimConfig
from lather.train.state import TrainingState
from lather.train.step import StepResult, TrainStep, build_optimizer

pytestmark = pytest.mark.timeout(600)  # of which a free machine needs a tenth

SEQUENCES = 8
"""Of a global batch; one per micro-batch, so that a step has the same balance losses on every mesh."""
TIED = {"tie_word_embeddings": True}
MESHES = {
    2: {
        "pp2": Case(pp=2, layers=4),
        "ep2": Case(ep=2, layers=4, schedule="sequential"),
        "dp2": Case(layers=4, schedule="sequential"),
    },
    4: {
        "pp2 ep2": Case(pp=2, ep=2, layers=4),
        "pp2 dp2": Case(pp=2, layers=4),
        "ep2 dp2": Case(ep=2, layers=4, schedule="sequential"),
        "dp4": Case(layers=4, schedule="sequential"),
        "hsdp": Case(replicas=2, layers=4, schedule="sequential"),
    },
}
ALONE = Case(layers=4, schedule="sequential")
RUNS = ("adamw", "soap")
NOT_WITH_SOAP = ("dp2", "pp2 dp2", "ep2 dp2", "hsdp")
"""For the time that it takes: the dense parameters are whole then, and experts are spread as on the others."""


def cases(world_size: int) -> list[tuple[str, str]]:
    """Optimizer and mesh."""
    return [(optimizer, name) for optimizer in RUNS for name in MESHES[world_size] if optimizer == "adamw" or name not in NOT_WITH_SOAP]


def changes_of_mesh(world_size: int) -> list[tuple[str, str, str]]:
    """Optimizer, from and to; every mesh is each once."""
    names = {optimizer: [name for other, name in cases(world_size) if other == optimizer] for optimizer in RUNS}
    return [(optimizer, *pair) for optimizer in RUNS for pair in itertools.pairwise([*names[optimizer], names[optimizer][0]])]


class Trainee:
    """An engine on a mesh with other weights than everybody else's, so that only loading makes it the same."""

    def __init__(self, case: Case, name: str, world_size: int, **changes: Any) -> None:
        data_ranks = world_size // case.pp
        settings = {
            **vars(case),
            "experts": 6,  # over four ranks two, two, two and none
            "num_micro_batches": SEQUENCES // data_ranks,
            "replicate_dense": name == "soap",
            "changes": {**TIED, **changes},
        }
        self.pair: Pair = make_pair(Case(**settings), seed=world_size)
        config = OptimConfig(name=name, lr=1e-2, precondition_frequency=2)  # type: ignore[arg-type]
        self.optimizer = build_optimizer(config, self.pair.engine.parameters.named())
        self.step = TrainStep(self.pair.engine, self.optimizer, max_grad_norm=0.5)
        self.state = TrainingState.of_engine(self.pair.engine, self.optimizer)

    def train(self, *steps: int) -> list[StepResult]:
        return [self.step(self.pair.tokens(step), 1e-2) for step in steps]

    def save(self, folder: Path, step: int) -> Path:
        return save_checkpoint(folder, Progress(step, 0.0), self.state, keep_last=9)


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in FILES}


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: x for file in FILES for name, x in load_file(path / file).items()}


def largest_difference(path: Path, expected: Path) -> float:
    """Relative to the largest value of each tensor; names, shapes and dtypes must be equal."""
    found, wanted = tensors(path), tensors(expected)
    assert found.keys() == wanted.keys()
    worst = 0.0
    for name, x in wanted.items():
        assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype), name
        if "basis" not in name:  # eigenvectors have no sign
            worst = max(worst, ((found[name] - x).abs().max() / x.abs().max().clamp(min=1e-3)).item())
    return worst


def resumed(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """What each mesh made of the checkpoint of one process, and of the other meshes' checkpoints."""
    found: dict[str, Any] = {}
    for optimizer, name in cases(world_size):
        case = MESHES[world_size][name]
        own = folder / optimizer / name
        trainee = Trainee(case, optimizer, world_size)
        progress = load_checkpoint(folder / optimizer / "alone" / "step-00000002", trainee.state)
        trainee.save(own, 2)
        results = trainee.train(3, 4, 5)
        trainee.save(own, 5)
        keys = {(rows.name) for rows in trainee.state.optimizer_state()}
        expected = {
            f"{entry.info.name}/{key}" for entry in trainee.pair.engine.parameters for key in trainee.optimizer.state[entry.parameter]
        }
        empty = sum(entry.info.is_empty for entry in trainee.pair.engine.parameters)
        adamw = all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in trainee.optimizer.state.values())
        all_have = len(trainee.optimizer.state) == len(trainee.pair.engine.parameters.entries)
        found[f"{optimizer} {name}"] = (
            progress,
            [(result.loss, result.grad_norm) for result in results],
            keys == expected and all_have and (adamw or optimizer == "soap"),
            empty,
        )
    for optimizer, first, second in changes_of_mesh(world_size):
        trainee = Trainee(MESHES[world_size][second], optimizer, world_size)
        trainee.train(*[1] if optimizer == "adamw" else [])  # state of its own, which must go
        load_checkpoint(folder / optimizer / first / "step-00000005", trainee.state)
        trainee.save(folder / optimizer / f"{first} to {second}", 5)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Loss and gradient norm of the uninterrupted run's steps 3 to 5."""
    found = {}
    for optimizer in RUNS:
        trainee = Trainee(ALONE, optimizer, 1)
        trainee.train(1, 2)
        trainee.save(folder / optimizer / "alone", 2)
        found[optimizer] = [(result.loss, result.grad_norm) for result in trainee.train(3, 4, 5)]
        trainee.save(folder / optimizer / "alone", 5)
    return found


@pytest.fixture(scope="module", params=[2, 4])
def meshes(request: pytest.FixtureRequest, folder: Path, alone: object) -> tuple[int, list[dict[str, Any]]]:
    return request.param, run_ranks(resumed, request.param, folder, timeout=500)


def test_a_mesh_saves_one_processs_file_bit_for_bit(meshes: tuple[int, object], folder: Path) -> None:
    for optimizer, name in cases(meshes[0]):
        step = "step-00000002"
        assert contents(folder / optimizer / name / step) == contents(folder / optimizer / "alone" / step), (optimizer, name)


def test_the_next_steps_are_the_uninterrupted_runs(
    meshes: tuple[int, list[dict[str, Any]]], alone: dict[str, list[tuple[float, float]]], folder: Path
) -> None:
    world_size, by_rank = meshes
    for (rank, found), (optimizer, name) in itertools.product(enumerate(by_rank), cases(world_size)):
        progress, results, _, _ = found[f"{optimizer} {name}"]
        assert progress == Progress(2, 0.0)
        torch.testing.assert_close(
            torch.tensor(results), torch.tensor(alone[optimizer]), rtol=1e-9, atol=0, msg=f"{rank} {optimizer} {name}"
        )
    for optimizer, name in cases(world_size):
        step = "step-00000005"
        assert largest_difference(folder / optimizer / name / step, folder / optimizer / "alone" / step) < 1e-8, (optimizer, name)


def test_another_mesh_takes_over_every_bit(meshes: tuple[int, object], folder: Path) -> None:
    for optimizer, first, second in changes_of_mesh(meshes[0]):
        saved = folder / optimizer / first / "step-00000005"
        assert contents(folder / optimizer / f"{first} to {second}" / "step-00000005") == contents(saved), (optimizer, first, second)


def test_one_process_takes_over_every_bit(meshes: tuple[int, object], folder: Path) -> None:
    for optimizer, name in cases(meshes[0]):
        trainee = Trainee(ALONE, optimizer, 1)
        saved = folder / optimizer / name / "step-00000005"
        assert load_checkpoint(saved, trainee.state).step == 5
        assert contents(trainee.save(folder / optimizer / f"{name} to one process", 5)) == contents(saved), (optimizer, name)


def test_every_rank_has_the_same_keys_even_without_rows(meshes: tuple[int, list[dict[str, Any]]]) -> None:
    world_size, by_rank = meshes
    for found, (optimizer, name) in itertools.product(by_rank, cases(world_size)):
        assert found[f"{optimizer} {name}"][2], (optimizer, name)
    if world_size == 4:
        assert max(found["adamw dp4"][3] for found in by_rank) > 0  # somebody has no experts
        assert max(found["soap dp4"][3] for found in by_rank) > 0


# --- failures -----------------------------------------------------------------------------------------------------------------------


def failures(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """What every rank raises."""
    trainee = Trainee(Case(pp=2, layers=4), "adamw", world_size)
    trainee.train(1)
    trainee.save(folder, 1)
    found: dict[str, Any] = {}
    write = checkpoint_module.write_safetensors

    def fill_the_disk(file: Path, tensors: Any, pieces: Any) -> None:
        """After some pieces were taken."""
        for tensor in list(tensors)[: 3 * (file.name == FILES[0])]:
            list(pieces(tensor.name))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("disk", "disk again"):
        checkpoint_module.write_safetensors = fill_the_disk
        with pytest.raises(OSError, match="No space") as full:
            trainee.save(folder, 2)
        found[name] = (full.value.errno, str(full.value), [path.name for path in folder.iterdir()])
        dist.barrier()
    checkpoint_module.write_safetensors = write
    trainee.save(folder, 2)
    found["after"] = sorted(path.name for path in folder.iterdir())

    before = {rows.name: rows.value.clone() for rows in trainee.state.weights()}
    dist.barrier()
    found["refused"] = [refusal(folder / name, trainee) for name in ("flipped", "cut", "no state", "other", "more layers", "soap")]
    with pytest.raises(CheckpointError, match="lacks"):
        load_parameters(folder / "fewer layers", trainee.state)
    found["unchanged"] = all(rows.value.equal(before[rows.name]) for rows in trainee.state.weights())
    return found


def refusal(path: Path, trainee: Trainee) -> str:
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, trainee.state)
    return str(error.value)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    for name in ("flipped", "cut", "no state"):
        Trainee(ALONE, "adamw", 1).save(folder / name, 1).rename(folder / "made")
        (folder / name).rmdir()
        (folder / "made").rename(folder / name)
    content = bytearray((folder / "flipped" / FILES[1]).read_bytes()) if (folder / "flipped" / FILES[1]).stat().st_size else bytearray(b"x")
    content[-1] ^= 1
    (folder / "flipped" / FILES[1]).write_bytes(content)
    (folder / "cut" / FILES[0]).write_bytes((folder / "cut" / FILES[0]).read_bytes()[:-1])
    (folder / "no state" / "state.json").unlink()
    for name, optimizer, changes in (
        ("other", "adamw", {"moe_intermediate_size": 13}),
        ("more layers", "adamw", {"num_hidden_layers": 5}),
        ("fewer layers", "adamw", {"num_hidden_layers": 3}),
        ("soap", "soap", {}),
    ):
        layers = changes.pop("num_hidden_layers", 4)
        case = Case(schedule="sequential", layers=layers)
        Trainee(case, optimizer, 1, **changes).save(folder / "made", 1).rename(folder / name)
    return folder


def test_what_one_rank_finds_wrong_all_raise(damaged: Path) -> None:
    first, second = run_ranks(failures, 2, damaged, timeout=500)
    others = [(ours.pop("refused"), ours) for ours in (first, second)]
    assert others[0][1] == others[1][1]
    for number, (one, another) in enumerate(zip(others[0][0], others[1][0], strict=True)):
        assert one == another or number == 3  # each rank names a layer of its own
    assert first["disk"][0] == errno.ENOSPC
    assert first["unchanged"]
    assert "step-00000001" in first["disk"][2]
    assert not any(name.startswith((".tmp", "step-00000002")) for name in first["disk"][2])
    assert "step-00000002" in first["after"]
    flipped, cut, no_state, other, more, soap = others[0][0]
    assert flipped.startswith(f"{damaged / 'flipped' / FILES[1]}: missing or damaged")
    assert cut.startswith(f"{damaged / 'cut' / FILES[0]}: missing or damaged")
    assert no_state.startswith(f"{damaged / 'no state' / 'state.json'}: missing or damaged")
    assert "but the model's" in other
    assert "has a surplus 'layers.4." in more
    assert "holds state of SOAP, not of AdamW" in soap


def sharded_soap(rank: int, world_size: int) -> str:
    pair = make_pair(Case(layers=4, schedule="sequential"))
    optimizer = SOAP(parameter_groups(pair.engine.parameters.named()))
    with pytest.raises(ValueError, match="needs whole matrices") as error:
        TrainStep(pair.engine, optimizer, 1.0)
    return str(error.value)


def test_soap_on_rows_of_matrices_is_refused() -> None:
    assert "replicate_dense=True" in run_ranks(sharded_soap, 2)[0]
