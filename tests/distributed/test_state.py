"""Checkpoints know nothing of meshes: any mesh saves one process's tensors, and goes on from any
checkpoint.

One process trains a step, saves, and trains three more. Every mesh loads its checkpoint, saves it
again (the same bits), trains the same two steps, and saves; other meshes and one process load that
and train the last one. SOAP renews its bases in steps 2 and 4."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import Case, Pair, make_pair, shared_mesh
from ranks import run_ranks
from stored import bytes_by_file, same_bits, stored_tensors

from lather.checkpoint import save as checkpoint_save
from lather.checkpoint.folder import Progress, Retention
from lather.checkpoint.reader import load_checkpoint
from lather.checkpoint.save import save_checkpoint
from lather.checkpoint.state import TrainingState
from lather.config.optim import optim_config
from lather.engine.optimizer import build_optimizer, head_rows_of
from lather.engine.step import TrainStep
from lather.engine.step_reading import StepResult
from lather.errors import CheckpointError

pytestmark = pytest.mark.timeout(600)  # a free machine needs a tenth of this

SEQUENCES = 8
"""Sequences in a global batch; a micro-batch has one, so that a step has the same balance losses on
every mesh."""
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
RUNS = ("adamw", "soap", "muon")
"""Rules of the matrices; Muon's are heads."""
LAYOUTS = ("alone", "dp2", "dp4", "pp2 ep2", "pp2 dp2")
"""Layouts of runs that change before the last step: SOAP's from each to the one before, the others'
from each of the first four to the next."""
ROUNDING = {"adamw": 1e-12, "soap": 1e-7, "muon": 1e-7}
"""Relative rounding of loss and gradient norm: the model is in fp64, the state of SOAP and Muon in
fp32."""
STATE_ROUNDING = {"adamw": 1e-10, "soap": 1e-5, "muon": 1e-5}
FILE = "rank-00000.safetensors"


def cases(world_size: int) -> list[tuple[str, str]]:
    """The pairs of optimizer and mesh."""
    return [
        (optimizer, name)
        for optimizer, name in itertools.product(RUNS, MESHES[world_size])
        if optimizer == "soap" or name in LAYOUTS[:4]
    ]


def changes_of_mesh(world_size: int) -> list[tuple[str, str, str]]:
    """The changes (optimizer, from, to), in which every mesh is each once."""
    names = {
        optimizer: [name for other, name in cases(world_size) if other == optimizer]
        for optimizer in RUNS
    }
    return [
        (optimizer, *pair)
        for optimizer in RUNS
        for pair in itertools.pairwise([*names[optimizer], names[optimizer][0]])
    ]


def changes_of_layout(world_size: int) -> list[tuple[str, str, str]]:
    """The changes (optimizer, from, to) whose `to` is a mesh of so many ranks."""
    of_size = {1: {"alone": ALONE}, **MESHES}[world_size]
    around = list(itertools.pairwise([*LAYOUTS[:4], LAYOUTS[0]]))
    backwards = list(itertools.pairwise([*reversed(LAYOUTS), LAYOUTS[-1]]))
    pairs = {"adamw": around, "muon": around, "soap": backwards}
    return [
        (optimizer, *pair) for optimizer in RUNS for pair in pairs[optimizer] if pair[1] in of_size
    ]


class Trainee:
    """An engine on a mesh whose weights differ from everybody else's, so that only loading makes
    them the same."""

    def __init__(self, case: Case, name: str, world_size: int) -> None:
        data_ranks = world_size // case.pp
        settings = {
            **vars(case),
            "experts": 6,  # four ranks have two, two, two and none
            "num_micro_batches": SEQUENCES // data_ranks,
            "changes": TIED,
        }
        self.pair: Pair = make_pair(Case(**settings), seed=world_size, mesh=shared_mesh(case))
        config = optim_config(
            name,
            lr=1e-2,
            rest={"lr_factor": 1.0},
            per_head=name == "muon",
            **({"precondition_frequency": 2} if "soap" in name else {}),
        )
        heads = head_rows_of(self.pair.plain)
        self.optimizer = build_optimizer(config, self.pair.engine.parameters, heads)
        self.step = TrainStep(self.pair.engine, self.optimizer, max_grad_norm=0.5)
        self.state = TrainingState(
            self.pair.engine.parameters,
            self.pair.engine.part,
            self.optimizer,
            self.pair.engine.mesh,
        )

    def spoil(self) -> None:
        """Fill weights and state with what no checkpoint has, so that only loading makes them
        right."""
        tensors = [x for state in self.optimizer.state.values() for x in state.values()]
        with torch.no_grad():
            for x in (*(entry.parameter for entry in self.pair.engine.parameters), *tensors):
                x.fill_(7)

    def train(self, *steps: int) -> list[StepResult]:
        return [self.step(self.pair.share_of(self.pair.tokens(step)), 1e-2) for step in steps]

    def save(self, folder: Path, step: int) -> Path:
        return save_checkpoint(folder, Progress(step, 0.0), self.state, retention=Retention(9))


def assert_close(
    found: list[tuple[float, float]], expected: list[tuple[float, float]], rtol: float, message: str
) -> None:
    one, other = (torch.tensor(each, dtype=torch.float64) for each in (found, expected))
    torch.testing.assert_close(
        one, other, rtol=rtol, atol=0, msg=f"{message}: {(one - other).abs().max():.1e}"
    )


def largest_difference(path: Path, expected: Path) -> float:
    """The largest difference relative to the largest value of each tensor; names, shapes and dtypes
    must be equal.

    Eigenvectors have no sign, and those of nearly equal eigenvalues may be any two of their plane.
    So momentum is compared in the parameter's coordinates, and second moments where both runs have
    the same eigenvectors.
    """
    found, wanted = stored_tensors(path), stored_tensors(expected)
    assert found.keys() == wanted.keys()
    worst = 0.0
    for name in wanted:
        pair = found[name], wanted[name]
        assert len({(each.shape, each.dtype) for each in pair}) == 1, name
        owner, _, key = name.rpartition("/")
        if "basis" in key:
            continue
        if key == "exp_avg":
            pair = in_parameter_coordinates(found, owner), in_parameter_coordinates(wanted, owner)
        elif key == "exp_avg_sq":
            same = same_eigenvectors(found, wanted, owner, pair[0])
            pair = pair[0] * same, pair[1] * same
        y, x = pair
        worst = max(worst, ((y - x).abs().max() / x.abs().max().clamp(min=1e-3)).item())
    return worst


def in_parameter_coordinates(tensors: Mapping[str, torch.Tensor], owner: str) -> torch.Tensor:
    x = tensors[f"{owner}/exp_avg"]
    for dim in (0, 1):
        basis = tensors.get(f"{owner}/basis_{dim}")
        if basis is not None:
            # the new dim is the last; after two turns the order is the old one
            x = torch.tensordot(x, basis, dims=([0], [1]))
        elif x.dim() == 2:
            x = x.T
    return x


def same_eigenvectors(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], owner: str, x: torch.Tensor
) -> torch.Tensor:
    """Return 1 for each coordinate of x in both of whose dims the two have the same eigenvector up
    to its sign, else 0; most are 1."""
    same = torch.ones_like(x)
    for dim in range(x.dim()):
        bases = [tensors.get(f"{owner}/basis_{dim}") for tensors in (one, other)]
        if bases[0] is not None and bases[1] is not None:
            aligned = (bases[0] * bases[1]).sum(0).abs() > 1 - 1e-4
            assert aligned.float().mean() > 0.75, owner
            same = same * aligned.view(-1, *(1,) * (x.dim() - 1 - dim))
    return same


def resumed(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Load the checkpoint of one process and those of the other meshes; returns what each mesh made
    of them."""
    found: dict[str, Any] = {}
    trainees: dict[tuple[str, str], Trainee] = {}
    for optimizer, name in cases(world_size):
        case = MESHES[world_size][name]
        own = folder / optimizer / name
        trainee = trainees[optimizer, name] = Trainee(case, optimizer, world_size)
        progress = load_checkpoint(folder / optimizer / "alone" / "step-00000001", trainee.state)
        trainee.save(own, 1)
        results = trainee.train(2, 3)
        trainee.save(own, 3)
        empty = sum(entry.info.is_empty for entry in trainee.pair.engine.parameters)
        adamw = all(
            set(state) == {"step", "exp_avg", "exp_avg_sq"}
            for state in trainee.optimizer.state.values()
        )
        all_have = len(trainee.optimizer.state) == len(trainee.pair.engine.parameters)
        found[f"{optimizer} {name}"] = (
            progress,
            [(result.loss, result.grad_norm) for result in results],
            all_have and (adamw or optimizer != "adamw"),
            empty,
        )
    for optimizer, first, second in changes_of_mesh(world_size):
        trainee = trainees[optimizer, second]
        trainee.spoil()
        load_checkpoint(folder / optimizer / first / "step-00000003", trainee.state)
        trainee.save(folder / optimizer / f"{first} to {second}", 3)
    return found


def resharded(rank: int, world_size: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Take step 4 on meshes of this size, each from another layout's step 3, and save; returns
    losses and gradient norms."""
    found = {}
    for optimizer, first, second in changes_of_layout(world_size):
        trainee = Trainee(
            ALONE if world_size == 1 else MESHES[world_size][second], optimizer, world_size
        )
        load_checkpoint(folder / optimizer / first / "step-00000003", trainee.state)
        found[f"{optimizer} {first} to {second}"] = [
            (result.loss, result.grad_norm) for result in trainee.train(4)
        ]
        trainee.save(folder / optimizer / f"{first} to {second}", 4)
    return found


def round_one(
    rank: int, world_size: int, folder: Path
) -> tuple[dict[str, Any], dict[str, list[tuple[float, float]]]]:
    """Run `resumed`, and on four ranks `resharded`, too, when two ranks have saved their
    checkpoints."""
    return resumed(rank, world_size, folder), resharded(
        rank, world_size, folder
    ) if world_size == 4 else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """The loss and gradient norm of the uninterrupted run's steps 2 to 4."""
    found = {}
    for optimizer in RUNS:
        trainee = Trainee(ALONE, optimizer, 1)
        trainee.train(1)
        trainee.save(folder / optimizer / "alone", 1)
        found[optimizer] = [(result.loss, result.grad_norm) for result in trainee.train(2, 3)]
        trainee.save(folder / optimizer / "alone", 3)
        found[optimizer] += [(result.loss, result.grad_norm) for result in trainee.train(4)]
        trainee.save(folder / optimizer / "alone", 4)
    return found


@pytest.fixture(scope="module")
def rounds(folder: Path, alone: object) -> dict[int, list[Any]]:
    return {size: run_ranks(round_one, size, folder, timeout=500) for size in (2, 4)}


@pytest.fixture(scope="module", params=[2, 4])
def meshes(
    request: pytest.FixtureRequest, rounds: dict[int, list[Any]]
) -> tuple[int, list[dict[str, Any]]]:
    return request.param, [found for found, _ in rounds[request.param]]


def test_a_mesh_saves_one_processs_tensors_bit_for_bit(
    meshes: tuple[int, object], folder: Path
) -> None:
    for optimizer, name in cases(meshes[0]):
        step = "step-00000001"
        assert same_bits(folder / optimizer / name / step, folder / optimizer / "alone" / step), (
            optimizer,
            name,
        )


def test_every_rank_writes_its_share(meshes: tuple[int, object], folder: Path) -> None:
    """This includes replicated parameters: if many ranks have one, a single rank writes it, and
    another rank writes the next one."""
    world_size = meshes[0]
    for optimizer, name in cases(world_size):
        sizes = bytes_by_file(folder / optimizer / name / "step-00000003")
        assert list(sizes) == [f"rank-{rank:05d}.safetensors" for rank in range(world_size)], (
            optimizer,
            name,
        )
        if MESHES[world_size][name].pp == 1:
            assert max(sizes.values()) < 1.35 * sum(sizes.values()) / world_size, (optimizer, name)


def test_the_next_steps_are_the_uninterrupted_runs(
    meshes: tuple[int, list[dict[str, Any]]],
    alone: dict[str, list[tuple[float, float]]],
    folder: Path,
) -> None:
    world_size, by_rank = meshes
    for (rank, found), (optimizer, name) in itertools.product(
        enumerate(by_rank), cases(world_size)
    ):
        progress, results, _, _ = found[f"{optimizer} {name}"]
        assert progress == Progress(1, 0.0)
        assert_close(
            results, alone[optimizer][:2], ROUNDING[optimizer], f"{rank} {optimizer} {name}"
        )
    for optimizer, name in cases(world_size):
        step = "step-00000003"
        assert (
            largest_difference(
                folder / optimizer / name / step, folder / optimizer / "alone" / step
            )
            < STATE_ROUNDING[optimizer]
        ), (
            optimizer,
            name,
        )


def test_another_mesh_takes_over_every_bit(meshes: tuple[int, object], folder: Path) -> None:
    for optimizer, first, second in changes_of_mesh(meshes[0]):
        saved = folder / optimizer / first / "step-00000003"
        assert same_bits(folder / optimizer / f"{first} to {second}" / "step-00000003", saved), (
            optimizer,
            first,
            second,
        )


def test_one_process_takes_over_every_bit(meshes: tuple[int, object], folder: Path) -> None:
    for optimizer, name in cases(meshes[0]):
        trainee = Trainee(ALONE, optimizer, 1)
        saved = folder / optimizer / name / "step-00000003"
        assert load_checkpoint(saved, trainee.state).step == 3
        assert same_bits(trainee.save(folder / optimizer / f"{name} to one process", 3), saved), (
            optimizer,
            name,
        )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_layout_goes_on_from_another_as_the_uninterrupted_run(
    world_size: int,
    rounds: dict[int, list[Any]],
    alone: dict[str, list[tuple[float, float]]],
    folder: Path,
) -> None:
    """The runs differ by rounding, as meshes add up in other orders."""
    by_rank = {
        1: lambda: [resharded(0, 1, folder)],
        2: lambda: run_ranks(resharded, 2, folder, timeout=500),
        4: lambda: [found for _, found in rounds[4]],
    }[world_size]()
    changes = changes_of_layout(world_size)
    assert changes
    for optimizer, first, second in changes:
        name = f"{first} to {second}"
        for found in by_rank:
            assert_close(
                found[f"{optimizer} {name}"],
                alone[optimizer][2:],
                ROUNDING[optimizer],
                f"{optimizer} {name}",
            )
        ends = [folder / optimizer / each / "step-00000004" for each in (name, "alone")]
        assert largest_difference(*ends) < STATE_ROUNDING[optimizer], (optimizer, name)
        shutil.rmtree(ends[0])


def test_every_rank_has_the_same_keys_even_without_rows(
    meshes: tuple[int, list[dict[str, Any]]],
) -> None:
    world_size, by_rank = meshes
    for found, (optimizer, name) in itertools.product(by_rank, cases(world_size)):
        assert found[f"{optimizer} {name}"][2], (optimizer, name)
    if world_size == 4:
        assert max(found["adamw dp4"][3] for found in by_rank) > 0  # a rank has no experts
        assert max(found["soap dp4"][3] for found in by_rank) > 0


# --- failures -------------------------------------------------------------------------------------


def failures(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Return what every rank raises."""
    trainee = Trainee(Case(pp=2, layers=4), "adamw", world_size)
    trainee.train(1)
    trainee.save(folder, 1)
    found: dict[str, Any] = {}
    write = checkpoint_save.write_safetensors

    def fill_the_disk(file: Path, tensors: Any, digest: Any) -> None:
        """Fail on the second rank, after some pieces were taken."""
        write(file, tensors[:3] if rank == 1 else tensors, digest)
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("disk", "disk again"):
        checkpoint_save.write_safetensors = fill_the_disk
        with pytest.raises(OSError, match="No space") as full:
            trainee.save(folder, 2)
        found[name] = (full.value.errno, str(full.value), [path.name for path in folder.iterdir()])
        dist.barrier()
    checkpoint_save.write_safetensors = write
    trainee.save(folder, 2)
    found["after"] = sorted(path.name for path in folder.iterdir())

    before = {piece.name: piece.value.clone() for piece in trainee.state.weights()}
    dist.barrier()
    found["refused"] = [refusal(folder / name, trainee) for name in ("flipped", "more layers")]
    found["unchanged"] = all(
        piece.value.equal(before[piece.name]) for piece in trainee.state.weights()
    )
    return found


def refusal(path: Path, trainee: Trainee) -> str:
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, trainee.state)
    return str(error.value)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    for name, layers in (("flipped", 4), ("more layers", 5)):
        case = Case(schedule="sequential", layers=layers)
        Trainee(case, "adamw", 1).save(folder / "made", 1).rename(folder / name)
    content = bytearray((folder / "flipped" / FILE).read_bytes())
    content[-1] ^= 1
    (folder / "flipped" / FILE).write_bytes(content)
    return folder


def test_what_one_rank_finds_wrong_all_raise(damaged: Path) -> None:
    first, second = run_ranks(failures, 2, damaged, timeout=500)
    assert first == second
    assert first["disk"][0] == errno.ENOSPC
    assert first["unchanged"]
    assert "step-00000001" in first["disk"][2]
    assert not any(name.startswith((".tmp", "step-00000002")) for name in first["disk"][2])
    assert "step-00000002" in first["after"]
    flipped, more_layers = first["refused"]
    assert flipped.startswith(f"{damaged / 'flipped' / FILE}: missing or damaged")
    assert "has a surplus 'layers.4." in more_layers
