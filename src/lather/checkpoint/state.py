"""The state of a training run on one rank, as pieces of tensors of the whole model.

On a mesh a rank has some layers, some of their experts, and some rows of each parameter or, for
optimizers that need whole matrices, some matrices. A checkpoint does not depend on this: it has
tensors with the names of the whole model, one per routed expert, and each rank has pieces of some
of them. The pieces are views of the run's own tensors, for saving and loading.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lather.boxes import Piece, PieceKey
from lather.checkpoint.folder import AVERAGE, StoredEntry
from lather.device import gpu_module, is_gpu
from lather.engine.averaged_weights import AveragedWeights
from lather.errors import CheckpointError
from lather.models.entry_names import entry_name, is_stack
from lather.optim import MatrixOptimizer
from lather.optim.batched.formats import DIAGONAL, ENCODED, SCALE, EntryFormat, Formats
from lather.optim.batched.remainders import REMAINDER
from lather.parallel.agreement import broadcast, errors_on_all_ranks, gather
from lather.parallel.local_parameters import LocalParameter, ShardInfo
from lather.parallel.mesh import Mesh

RANDOM = "random/"
"""Prefix of the names of random states, which distinguishes them from parameters and optimizer
state."""

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes of optimizer state, by entry and key."""


EntryPieces = tuple[Mapping[str, EntryFormat], Mapping[str, Piece]]
"""The formats of a parameter's optimizer state, and its pieces, or those of one of its experts, by
key."""


class TrainingState:
    """Weights, buffers, averaged weights, optimizer state and random state of this rank, for saving
    and loading."""

    def __init__(
        self,
        parameters: Iterable[LocalParameter],
        module: nn.Module,
        optimizer: MatrixOptimizer | None,
        mesh: Mesh,
        average: AveragedWeights | None = None,
    ) -> None:
        """`parameters`: those of a rank's engine or of a whole model; `module`: its part of the
        model, or the model."""
        self.parameters, self.optimizer, self.mesh = list(parameters), optimizer, mesh
        self.average = average
        persistent = module.state_dict().keys()
        self._buffers = [
            _whole(name, x) for name, x in module.named_buffers() if name in persistent
        ]
        self._infos: dict[Tensor, ShardInfo] = {}
        for entry in self.parameters:
            length = len(entry.source)
            first = mesh.ep_rank * length if entry.info.is_expert else 0
            self._infos[entry.source] = replace(entry.info, offset=first, length=length)

    @classmethod
    def of_model(cls, model: nn.Module, optimizer: MatrixOptimizer | None = None) -> TrainingState:
        """Describe a whole model in one process."""
        infos = [
            (ShardInfo(name, is_stack(name), tuple(p.shape), 0, len(p)), p)
            for name, p in model.named_parameters()
        ]
        return cls(
            [LocalParameter(info, p, p) for info, p in infos],
            model,
            optimizer,
            Mesh.single(torch.device("cpu")),
        )

    def names(self) -> set[str]:
        """Return the names of the parameters, one per expert, and of the buffers of all ranks;
        every rank calls this."""
        names, group = {piece.name for piece in self.weights()}, self.mesh.control_group
        return broadcast(set().union(*gather(names, group)), group)

    def pieces(self) -> list[Piece]:
        """Return everything that a checkpoint holds."""
        optimizer = self.optimizer_state()
        return [*self.weights(), *self.averages(), *optimizer, *self.random_state()]

    def weights(self) -> Iterator[Piece]:
        """Yield parameters, tied ones once, and persistent buffers."""
        for entry in self.parameters:
            yield from _pieces(entry.info, _whole("", entry.parameter.detach()))
        yield from self._buffers

    def averages(self) -> Iterator[Piece]:
        """Yield the averages of trained parameters, if the run has them."""
        values = {} if self.average is None else self.average.values
        for entry in self.parameters:
            if entry.source in values:
                for piece in _pieces(entry.info, _whole("", values[entry.source])):
                    yield replace(piece, name=f"{AVERAGE}{piece.name}")

    def remainders(self) -> dict[PieceKey, Tensor]:
        """Return by the keys of pieces of weights in bf16 what rounding has dropped from them, as
        the optimizer's state has it."""
        return {
            (piece.name.removesuffix(f"/{REMAINDER}"), piece.offset[:-1]): piece.value
            for piece in self.optimizer_state()
            if piece.name.endswith(f"/{REMAINDER}")
        }

    def optimizer_state(self) -> Iterator[Piece]:
        """Yield the entries of the optimizer state as `<parameter>/<key>`; all are tensors."""
        if self.optimizer is None:
            return
        for _, _, piece in self._optimizer_parts():
            yield piece

    def optimizer_entries(self) -> list[EntryPieces]:
        """Return the optimizer state by parameter, expert or head: its formats, and its pieces by
        key."""
        assert self.optimizer is not None
        pieces, of_param = dict[Any, list[dict[str, Piece]]](), dict[Tensor, Formats]()
        for param, formats, part in self._optimizer_parts():
            entry, _, key = part.name.rpartition("/")
            of_param[param], several = formats, pieces.setdefault((param, entry), [{}])
            if all(key in of_entry for of_entry in several):
                several.append({})
            # the heads that this rank has are in the same order under every key
            next(of_entry for of_entry in several if key not in of_entry)[key] = part
        return [
            (of_param[param], of_entry)
            for (param, _), several in pieces.items()
            for of_entry in several
        ]

    def _optimizer_parts(self) -> Iterator[tuple[Tensor, Formats, Piece]]:
        """Yield the pieces of the optimizer state, named as in a checkpoint, with parameter and
        formats."""
        assert self.optimizer is not None
        formats = self.optimizer.formats()
        in_16_bits = {
            param: {
                key: len(entry.shape)
                for form in of_param.values()
                if form.is_whole
                for key, entry in form.stored.items()
            }
            for param, of_param in formats.items()
        }
        for param, piece in self.optimizer.state_pieces():
            # codes and diagonal have other numbers of rows, of which one may be that of experts
            is_whole = len(piece.shape) == in_16_bits[param].get(piece.name)
            for part in _pieces(self._infos[param], piece, is_whole=is_whole):
                yield param, formats[param], part

    def random_state(self) -> list[Piece]:
        """Return copies of the states of torch's generators, by rank; none without an optimizer."""
        if self.optimizer is None:
            return []
        states = {"cpu": torch.get_rng_state()}
        if is_gpu(self.mesh.device):
            states["cuda"] = gpu_module(self.mesh.device).get_rng_state(self.mesh.device)
        return [
            Piece(f"{RANDOM}{name}.{self.mesh.rank}", state, (0,), (len(state),))
            for name, state in states.items()
        ]

    def set_random_state(self, pieces: Iterable[Piece]) -> None:
        """Set the random states from the pieces of `random_state`, after loading into them."""
        for piece in pieces:
            if piece.name.startswith(f"{RANDOM}cuda"):
                gpu_module(self.mesh.device).set_rng_state(piece.value, self.mesh.device)
            else:
                torch.set_rng_state(piece.value)

    def create_optimizer_state(self, stored: Mapping[str, StoredEntry]) -> None:
        """Replace the optimizer state by the initial one, to load the stored entries into. Every
        rank calls this.

        Raises CheckpointError, on all ranks, if the optimizer has another state than the stored
        one; the earlier state is then restored."""
        assert self.optimizer is not None
        before, shapes = dict(self.optimizer.state), state_shapes(stored)
        self.optimizer.state.clear()
        self.optimizer.init_state()
        try:
            with errors_on_all_ranks(self.mesh.control_group):
                self._check_optimizer_state(shapes)
        except CheckpointError:
            self.optimizer.state.clear()
            self.optimizer.state.update(before)
            raise

    def _check_optimizer_state(self, shapes: Shapes) -> None:
        assert self.optimizer is not None
        optional = self.optimizer.optional_entries()
        of_run = state_shapes({piece.name: piece for piece in self.optimizer_state()})
        for entry in sorted(of_run.keys() & shapes.keys()):
            # ranks that do not own the matrix have its step only
            owns = of_run[entry].keys() != {"step"}
            for key in sorted(of_run[entry].keys() | (shapes[entry].keys() if owns else set())):
                stored, current = (of[entry].get(key, "absent") for of in (shapes, of_run))
                if stored != current and not (key in optional and "absent" in (stored, current)):
                    raise CheckpointError(
                        f"{entry}/{key} is {stored} in the checkpoint and {current} in this run"
                    )


def state_shapes(tensors: Mapping[str, StoredEntry | Piece]) -> Shapes:
    """Return the shapes of the optimizer state among the tensors of a checkpoint, or among pieces
    of a state, by entry and without scales and diagonals: either may have other formats."""
    shapes: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, tensor in tensors.items():
        entry, slash, key = name.rpartition("/")
        is_state = slash and not name.startswith((AVERAGE, RANDOM))
        if is_state and key != REMAINDER and not key.endswith((SCALE, DIAGONAL)):
            kept = key.removesuffix(ENCODED)
            in_16_bits = f"{entry}/{kept}{DIAGONAL}" in tensors  # pairs of bytes
            shapes[entry][kept] = tensor.shape[:-1] if in_16_bits else tensor.shape
    return shapes


def _whole(name: str, value: Tensor) -> Piece:
    return Piece(name, value, (0,) * value.dim(), tuple(value.shape))


def _pieces(info: ShardInfo, piece: Piece, *, is_whole: bool = False) -> Iterator[Piece]:
    """Yield the pieces, named as in a checkpoint, of a piece that belongs to the rows of a
    parameter: one per expert, a range of rows, or one piece if its tensor is not divided, as one
    that `is_whole` never is. A piece with a name is optimizer state."""
    suffix, offset, shape = f"/{piece.name}" if piece.name else "", piece.offset, piece.shape
    has_rows = bool(shape) and shape[0] == info.length and not is_whole
    if has_rows and info.is_expert:
        for number, expert in enumerate(piece.value.unbind(), info.offset + offset[0]):
            yield Piece(f"{entry_name(info.name, number)}{suffix}", expert, offset[1:], shape[1:])
        return
    if has_rows and info.length != info.shape[0]:
        offset, shape = (info.offset + offset[0], *offset[1:]), (info.shape[0], *shape[1:])
    yield Piece(f"{info.name}{suffix}", piece.value, offset, shape)
