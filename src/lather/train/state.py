"""The state of a training run, as a rank has it and as the whole model's.

On a mesh a rank has some layers, of these some experts, and of each parameter some rows. A checkpoint knows nothing of that: it has whole
tensors under the names of the whole model. `Gathering` puts them together on rank 0 and `load_*` takes a rank's rows out of them, one piece
at a time: no rank ever has more in memory than its own state and one piece.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lather.models.safetensors_folder import TensorToWrite
from lather.parallel.local import LocalParameters, ShardInfo

if TYPE_CHECKING:
    from lather.train.engine import Engine

Index = tuple[int | slice, ...]
Read = Callable[[str, Index], Tensor]
"""Gives `whole[index]` of a tensor of the whole model, by name."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor of the whole model."""

    name: str
    value: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: int = 0
    """Of the first row."""
    is_copy: bool = False
    """Another rank has the same rows and saves them."""

    @property
    def index(self) -> Index:
        """Of these rows in the whole tensor."""
        return () if tuple(self.value.shape) == self.shape else (slice(self.offset, self.offset + len(self.value)),)


@dataclass(frozen=True)
class _Owned:
    """A parameter as the optimizer knows it."""

    info: ShardInfo
    parameter: nn.Parameter


class TrainingState:
    """Weights, buffers and optimizer state of this rank; for saving and loading."""

    def __init__(
        self,
        owned: Iterable[_Owned],
        buffers: Iterable[Rows],
        optimizer: torch.optim.Optimizer | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`group`: all ranks, the mesh's `control_group`; None: one process."""
        self._owned, self._buffers = list(owned), list(buffers)
        self.optimizer, self.group = optimizer, group

    @classmethod
    def of_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingState:
        """Of a whole model in one process."""
        owned = [_Owned(ShardInfo(name, False, tuple(p.shape), 0, len(p)), p) for name, p in model.named_parameters()]
        return cls(owned, _buffers(model), optimizer, None)

    @classmethod
    def of_engine(cls, engine: Engine, optimizer: torch.optim.Optimizer | None = None) -> TrainingState:
        """Of this rank of a mesh; every rank makes one."""
        parameters: LocalParameters = engine.parameters
        owned = [_Owned(entry.info, entry.parameter) for entry in parameters]
        return cls(owned, _buffers(engine.part, is_copy=engine.mesh.data_rank > 0), optimizer, engine.mesh.control_group)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reads and writes for all."""
        return self.group is None or dist.get_rank(self.group) == 0

    def names(self) -> set[str]:
        """Of parameters and buffers of all ranks; every rank calls it."""
        own = {rows.name for rows in self.weights()}
        everybody = [own]
        if self.group is not None:
            everybody = [set() for _ in range(dist.get_world_size(self.group))]
            dist.all_gather_object(everybody, own, group=self.group)
        return set().union(*everybody)

    def weights(self) -> Iterator[Rows]:
        """Parameters by name, tied ones once, and buffers that are part of the state."""
        for owned in self._owned:
            yield _rows(owned.info, owned.info.name, owned.parameter.detach())
        yield from self._buffers

    def optimizer_state(self) -> Iterator[Rows]:
        """By `<parameter name>/<key>`, every entry a tensor."""
        state = {} if self.optimizer is None else self.optimizer.state
        for owned in self._owned:
            for key, value in state.get(owned.parameter, {}).items():
                yield _rows(owned.info, f"{owned.info.name}/{key}", torch.as_tensor(value))

    @torch.no_grad()
    def load_weights(self, names: Iterable[str], read: Read) -> None:
        """Those of `names` that are here."""
        wanted = set(names)
        for rows in self.weights():
            if rows.name in wanted:
                rows.value.copy_(read(rows.name, rows.index))

    def load_optimizer_state(self, shapes: Mapping[str, Mapping[str, tuple[int, ...]]], read: Read) -> None:
        """`shapes` of whole entries by parameter name and key, `read` by `<parameter name>/<key>`; parameters without start afresh, and so
        do those without rows here."""
        assert self.optimizer is not None
        state_dict = self.optimizer.state_dict()
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        infos = {owned.parameter: owned.info for owned in self._owned}
        state: dict[int, dict[str, Any]] = {}
        for index, p in zip(ids, params, strict=True):
            info = infos[p]
            if info.is_empty:  # nor has it the factors of matrices
                continue
            for key, shape in shapes.get(info.name, {}).items():
                value = read(f"{info.name}/{key}", _own_index(info, shape))
                state.setdefault(index, {})[key] = value if key == "step" else value.to(p.device)
        state_dict["state"] = state
        self.optimizer.load_state_dict(state_dict)


def _buffers(module: nn.Module, *, is_copy: bool = False) -> list[Rows]:
    kept = module.state_dict().keys()
    return [Rows(name, x, tuple(x.shape), is_copy=is_copy) for name, x in module.named_buffers() if name in kept]


def _rows(info: ShardInfo, name: str, value: Tensor) -> Rows:
    """What belongs to a parameter: as many rows as it has here, or something that is not divided."""
    divided = info.length != info.shape[0] and value.dim() > 0 and len(value) == info.length
    shape = (info.shape[0], *value.shape[1:]) if divided else tuple(value.shape)
    is_copy = info.replica > 0 or info.is_empty or (not divided and info.offset > 0)
    return Rows(name, value, shape, info.offset if divided else 0, is_copy)


def _own_index(info: ShardInfo, shape: tuple[int, ...]) -> Index:
    divided = info.length != info.shape[0] and len(shape) > 0 and shape[0] == info.shape[0]
    return (slice(info.offset, info.offset + info.length),) if divided else ()


@dataclass(frozen=True)
class _Piece:
    """Rows that a rank has of a tensor in one of the files."""

    file: int
    name: str
    rank: int
    offset: int
    own_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class Gathering:
    """Whole tensors for files on rank 0, from what all ranks have of them. Every rank makes one.

    Rank 0 then takes `pieces` file by file, tensor by tensor, in the order of `tensors`, and `finish`es, whatever happened; all others
    `send`.
    """

    def __init__(self, files: Sequence[Iterable[Rows]], group: dist.ProcessGroup | None) -> None:
        """`files`: this rank's rows for each file; `group`: all ranks, None for one process."""
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self._own: dict[tuple[int, str], Tensor] = {}
        outline = []
        for file, some in enumerate(files):
            for rows in some:
                if not rows.is_copy:
                    self._own[file, rows.name] = rows.value
                    own_shape, dtype = tuple(rows.value.shape), rows.value.dtype
                    outline.append(_Piece(file, rows.name, self.rank, rows.offset, own_shape, rows.shape, dtype))
        outlines = [outline]
        if group is not None:
            outlines = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(outlines, outline, group=group)
        pieces = (piece for own in outlines for piece in own)
        self._pieces = sorted(pieces, key=lambda piece: (piece.file, -piece.dtype.itemsize, piece.name, piece.offset))
        self._check()
        self._arriving = deque(piece for piece in self._pieces if piece.rank > 0)

    def _check(self) -> None:
        """Every row of every tensor is there, once."""
        found: defaultdict[tuple[int, str], int] = defaultdict(int)
        for piece in self._pieces:
            assert piece.own_shape == piece.shape or found[piece.file, piece.name] == piece.offset, piece
            found[piece.file, piece.name] += piece.own_shape[0] if piece.own_shape else 1
        for piece in self._pieces:
            assert found[piece.file, piece.name] == (piece.shape[0] if piece.shape else 1), piece

    def tensors(self, file: int) -> list[TensorToWrite]:
        """What the file will hold, the widest dtypes first."""
        whole = {piece.name: TensorToWrite(piece.name, piece.dtype, piece.shape) for piece in self._pieces if piece.file == file}
        return list(whole.values())

    def pieces(self, file: int, name: str) -> Iterator[Tensor]:
        """The tensor's rows, in order."""
        for piece in self._pieces:
            if (piece.file, piece.name) == (file, name):
                yield self._own[file, name] if piece.rank == 0 else self._receive(piece)

    def send(self) -> None:
        for piece in self._pieces:
            if piece.rank == self.rank:
                dist.send(self._own[piece.file, piece.name].cpu().contiguous(), 0, group=self.group)

    def finish(self) -> None:
        """Take what was not asked for, so that nobody waits for ever."""
        while self._arriving:
            self._receive(self._arriving[0])

    def _receive(self, piece: _Piece) -> Tensor:
        assert self._arriving.popleft() is piece
        rows = torch.empty(piece.own_shape, dtype=piece.dtype)
        dist.recv(rows, piece.rank, group=self.group)
        return rows
