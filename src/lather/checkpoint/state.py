"""The state of a training run on one rank, as pieces of tensors of the whole model.

On a mesh a rank has some layers, some of their experts, and some rows of each parameter or, for optimizers that need whole matrices, some
matrices. A checkpoint does not depend on this: it has tensors with the names of the whole model, one per routed expert, and each rank has
pieces of some of them. The pieces are views of the run's own tensors, for saving and loading.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lather.checkpoint.table import StoredEntry
from lather.device import gpu_module, is_gpu
from lather.errors import CheckpointError
from lather.models.entry_names import entry_name, is_stack, split_entry
from lather.optim.sharded.placement import Piece, PieceKey
from lather.parallel.agreement import errors_on_all_ranks
from lather.parallel.local_parameters import ShardInfo

if TYPE_CHECKING:
    from lather.engine.engine import Engine

RANDOM = "random/"
"""Prefix of the names of random states, which distinguishes them from parameters and optimizer state."""

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes of optimizer state, by entry and key."""


CopyTensors = Callable[[Mapping[PieceKey, Tensor]], Mapping[PieceKey, Tensor]]
"""Replaces the tensors that this rank is to write by those that are written."""


@dataclass(frozen=True)
class _Owned:
    """A parameter in the forms in which an optimizer may have it."""

    info: ShardInfo
    parameter: nn.Parameter
    """This rank's rows."""
    source: nn.Parameter
    """The sharded parameter, which the optimizer may have instead."""
    first: int = 0
    """Index of the first expert of `source` in the whole model."""

    def rows(self, param: Tensor) -> tuple[int, int]:
        """Return the first row and the number of rows of `param`, which is one of the two."""
        return (self.info.offset, self.info.length) if param is self.parameter else (self.first, len(self.source))


class TrainingState:
    """Weights, buffers, optimizer state and random state of this rank, for saving and loading."""

    def __init__(
        self,
        owned: Iterable[_Owned],
        buffers: Iterable[Piece],
        optimizer: torch.optim.Optimizer | None,
        groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None),
        device: torch.device | None = None,
    ) -> None:
        """`groups`: the mesh's `control_group` and `saving_group`, both with all ranks; None: one process."""
        self._owned, self._buffers = list(owned), list(buffers)
        self._by_param: dict[Tensor, _Owned] = {p: owned for owned in self._owned for p in (owned.source, owned.parameter)}
        self.optimizer, self.device = optimizer, device or torch.device("cpu")
        self.group, self.saving_group = groups
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.num_ranks = 1 if self.group is None else dist.get_world_size(self.group)

    @classmethod
    def of_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingState:
        """Describe a whole model in one process."""
        infos = {name: ShardInfo(name, is_stack(name), tuple(p.shape), 0, len(p)) for name, p in model.named_parameters()}
        owned = [_Owned(infos[name], p, p) for name, p in model.named_parameters()]
        return cls(owned, _buffers(model), optimizer)

    @classmethod
    def of_engine(cls, engine: Engine, optimizer: torch.optim.Optimizer | None = None) -> TrainingState:
        """Describe this rank of a mesh."""
        mesh = engine.mesh
        owned = [
            _Owned(entry.info, entry.parameter, entry.source, mesh.ep_rank * len(entry.source) if entry.info.is_expert else 0)
            for entry in engine.parameters
        ]
        return cls(owned, _buffers(engine.part), optimizer, (mesh.control_group, mesh.saving_group), mesh.device)

    def names(self) -> set[str]:
        """Return the names of the parameters, one per expert, and of the buffers of all ranks; every rank calls this."""
        own = {piece.name for piece in self.weights()}
        everybody = [own]
        if self.group is not None:
            everybody = [set() for _ in range(self.num_ranks)]
            dist.all_gather_object(everybody, own, group=self.group)
        return set().union(*everybody)

    def weights(self) -> Iterator[Piece]:
        """Yield parameters, tied ones once, and persistent buffers."""
        for owned in self._owned:
            yield from _pieces(owned.info, owned.rows(owned.parameter), _whole("", owned.parameter.detach()))
        yield from self._buffers

    def optimizer_state(self) -> Iterator[Piece]:
        """Yield the entries of the optimizer state as `<parameter>/<key>`; all are tensors."""
        for param, piece in _optimizer_pieces(self.optimizer):
            owned = self._by_param[param]
            yield from _pieces(owned.info, owned.rows(param), piece)

    def random_state(self) -> list[Piece]:
        """Return copies of the states of torch's generators, by rank; none without an optimizer."""
        if self.optimizer is None:
            return []
        states = {"cpu": torch.get_rng_state()}
        if is_gpu(self.device):
            states["cuda"] = gpu_module(self.device).get_rng_state(self.device)
        return [Piece(f"{RANDOM}{name}.{self.rank}", state, (0,), (len(state),)) for name, state in states.items()]

    def set_random_state(self, pieces: Iterable[Piece]) -> None:
        """Set the random states from the pieces of `random_state`, after loading into them."""
        for piece in pieces:
            if piece.name.startswith(f"{RANDOM}cuda"):
                gpu_module(self.device).set_rng_state(piece.value, self.device)
            else:
                torch.set_rng_state(piece.value)

    def create_optimizer_state(self, stored: Mapping[str, StoredEntry]) -> None:
        """Replace the optimizer state by one with the stored entries, to load into; parameters without stored state begin with
        none. Every rank calls this.

        Raises CheckpointError, on all ranks, if the optimizer has another state than the stored one; the earlier state is then restored.
        """
        assert self.optimizer is not None
        before = dict(self.optimizer.state)
        self.optimizer.state.clear()
        if hasattr(self.optimizer, "init_state"):
            self.optimizer.init_state()
        else:
            self._allocate(stored_shapes(stored))
        try:
            with errors_on_all_ranks(self.group):
                self._check_optimizer_state(stored)
        except CheckpointError:
            self.optimizer.state.clear()
            self.optimizer.state.update(before)
            raise

    def _check_optimizer_state(self, stored: Mapping[str, StoredEntry]) -> None:
        shapes = stored_shapes(stored)
        found: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for piece in self.optimizer_state():
            entry, _, key = piece.name.rpartition("/")
            found[entry][key] = piece.shape
        for entry in sorted(found.keys() & shapes.keys()):
            owns = found[entry].keys() != {"step"}  # ranks that do not own the matrix have its step only
            for key in sorted(found[entry].keys() | (shapes[entry].keys() if owns else set())):
                there, here = (of[entry].get(key, "absent") for of in (shapes, found))
                if there != here:
                    raise CheckpointError(f"{entry}/{key} is {there} in the checkpoint and {here} in this run")

    def _allocate(self, shapes: Shapes) -> None:
        """Allocate the state of an optimizer with elementwise rules, whose entries have as many rows as the parameter."""
        assert self.optimizer is not None
        state_dict = self.optimizer.state_dict()
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for index, p in zip(ids, params, strict=True):
            owned = self._by_param[p]
            entries = dict.fromkeys(shapes.get(owned.info.name, {}), ())
            one = entry_name(owned.info.name, 0) if owned.info.is_expert else owned.info.name
            entries |= {key: tuple(p.shape) if shape else () for key, shape in shapes.get(one, {}).items()}
            if entries:
                state[index] = {key: torch.zeros(shape, dtype=torch.float32 if not shape else p.dtype) for key, shape in entries.items()}
        self.optimizer.load_state_dict({**state_dict, "state": state})


def stored_shapes(stored: Mapping[str, StoredEntry]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the optimizer state among the stored entries."""
    shapes: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, stored_entry in stored.items():
        entry, slash, key = name.rpartition("/")
        if slash and not name.startswith(RANDOM):
            shapes[entry][key] = stored_entry.shape
    return dict(shapes)


def parameter_of(entry: str) -> str:
    """Return the parameter to which an entry belongs; entries of all experts of a stack belong to the same one."""
    return split_entry(entry)[0]


def _whole(name: str, value: Tensor) -> Piece:
    return Piece(name, value, (0,) * value.dim(), tuple(value.shape))


def _buffers(module: nn.Module) -> list[Piece]:
    kept = module.state_dict().keys()
    return [_whole(name, x) for name, x in module.named_buffers() if name in kept]


def _optimizer_pieces(optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[Tensor, Piece]]:
    """Yield the pieces of the optimizer's state with their parameters: from `state_pieces`, or else all of its state."""
    if optimizer is None:
        return
    if hasattr(optimizer, "state_pieces"):
        yield from optimizer.state_pieces()
    else:
        for param, entries in optimizer.state.items():
            yield from ((param, _whole(key, value)) for key, value in entries.items())


def _pieces(info: ShardInfo, rows: tuple[int, int], piece: Piece) -> Iterator[Piece]:
    """Yield the pieces, named as in a checkpoint, of a piece that belongs to a parameter with these `rows` (first, number): one per expert,
    a range of rows, or one piece if its tensor is not divided. A piece with a name is optimizer state."""
    first, length = rows
    suffix, offset, shape = f"/{piece.name}" if piece.name else "", piece.offset, piece.shape
    if shape and shape[0] == length and info.is_expert:
        for number, one in enumerate(piece.value.unbind()):
            yield Piece(f"{entry_name(info.name, first + offset[0] + number)}{suffix}", one, offset[1:], shape[1:])
    elif shape and shape[0] == length and length != info.shape[0]:
        yield Piece(f"{info.name}{suffix}", piece.value, (first + offset[0], *offset[1:]), (info.shape[0], *shape[1:]))
    else:
        yield Piece(f"{info.name}{suffix}", piece.value, offset, shape)
