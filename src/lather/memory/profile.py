"""Lists the tensors that a forward pass keeps for backward: where and by what each was saved, and
its bytes.

The forward pass runs once under `torch.autograd.graph.saved_tensors_hooks`. A tensor counts if
autograd still holds it when the pass has ended. Tensors saved by a part of the graph that has
become unreachable are gone by then, and so are storages that were resized to 0.

Each storage counts once, with all of its bytes, at its first saver: a view of a large tensor keeps
the whole of it. Storages are distinguished by identity while a reference is held; an address is
reused as soon as a tensor is freed, and differs between views.

    weight        the storage of a parameter or buffer
    weight copy   a parameter cast or rearranged into its own storage, as by autocast; does not grow
                  with the tokens
    activation    everything else

The place of a storage is the innermost module whose forward was running, found by module hooks, and
the segment, found by wrapping the segment methods of a block during the pass. Its saver is
autograd's name for the operation and its argument, found afterwards in the graph of the output; a
tensor that the output's graph does not reach (cut graphs, checkpointing) has no name but counts as
well.

Tensors that a custom `autograd.Function` keeps as attributes of its context, also inside
dataclasses and containers, do not pass through the hooks. They are found in the output's graph, and
placed by marks on the graph's nodes that are set when modules and segments end. Not found: such
tensors in parts of the graph that the output does not reach or in other kinds of objects, and
tensors in a function's closure. A cast without gradient inside a custom Function counts as an
activation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from typing import Any, Literal
from unittest.mock import patch

from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from lather.storages import tensors_in

Kind = Literal["weight", "weight copy", "activation"]
KINDS: tuple[Kind, ...] = ("activation", "weight copy", "weight")

BLOCK_SEGMENTS = ("attend_and_route", "dispatch", "run_experts", "combine", "aggregate")
"""Methods of a `lather.models.decoder.Block`; a module that has all of them is a block."""

OUTSIDE = "loss"
"""Layer of tensors that are saved while only the model itself runs."""

OUTER_SEGMENTS = {
    "embed_tokens": "embedding",
    "norm": "final_norm",
    "lm_head": "head_and_loss",
    OUTSIDE: "head_and_loss",
}
"""Segment of tensors saved in these layers of a decoder, which is a model that has all of these
modules. Its own forward is head and loss."""

RAW = "_raw_saved_"
"""Prefix of a node's attributes that hold saved tensors without unpacking them: unpacking those of
a checkpoint would run it again."""

OTHER = "other"
"""Segment of all other tensors, such as those of a block's own forward between its segments."""

SEGMENTS = ("embedding", *BLOCK_SEGMENTS, OTHER, "final_norm", "head_and_loss")
"""All segments, in the order of a forward pass."""

REARRANGED = re.compile(
    r"(ToCopy|T|Transpose|Permute|View|UnsafeView|ReshapeAlias|Alias|Clone|Expand|Select|Slice|Split|SplitWithSizes|Unbind|Squeeze|Unsqueeze)"
    r"Backward\d+"
)
"""Operations whose output has the numbers of their input, cast or moved."""


@dataclass(frozen=True)
class Place:
    """A place in the model."""

    layer: str
    segment: str
    module: str
    """Dotted path; empty for the model itself and outside of it."""


@dataclass(frozen=True)
class SavedStorage:
    """A storage that is kept for backward, described by the first tensor that was saved of it."""

    layer: str
    segment: str
    module: str
    """Dotted path of the module whose forward saved it."""
    saved_by: str
    """Operation and its argument ("MulBackward0.self"); empty if the output's graph does not reach
    it."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Bytes of the whole storage."""
    kind: Kind
    weight: str
    """The parameter or buffer that it is, or of which it is a copy."""
    num_saves: int
    """How often it was saved."""
    also_saved_in: tuple[str, ...]
    """Other layers and segments ("layers.0 aggregate") that saved it too."""

    def renamed(self, layers: Mapping[str, str]) -> SavedStorage:
        """Return a copy with other names for some layers, all replaced at once."""
        return dataclasses.replace(
            self,
            layer=layers.get(self.layer, self.layer),
            module=_rename(self.module, layers),
            weight=_rename(self.weight, layers),
            also_saved_in=tuple(_rename(place, layers) for place in self.also_saved_in),
        )


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that one forward pass keeps for backward."""

    storages: tuple[SavedStorage, ...]
    """In the order in which they were first saved."""
    num_tokens: int
    """Tokens of the pass, for bytes per token."""

    def bytes(
        self, kind: Kind | None = None, *, layer: str | None = None, segment: str | None = None
    ) -> int:
        """Return the bytes of the storages of this kind, layer and segment; None: of any."""
        return sum(
            one.bytes
            for one in self.storages
            if kind in (None, one.kind)
            and layer in (None, one.layer)
            and segment in (None, one.segment)
        )

    def per_token(self, bytes_: float) -> float:
        return bytes_ / max(1, self.num_tokens)

    def layers(self) -> tuple[str, ...]:
        """Return the layers in the order in which they first saved a tensor, numbered ones by
        number."""
        seen = dict.fromkeys(one.layer for one in self.storages)
        stems = list(dict.fromkeys(layer.rstrip("0123456789") for layer in seen))
        return tuple(
            sorted(
                seen, key=lambda layer: (stems.index(layer.rstrip("0123456789")), len(layer), layer)
            )
        )

    def segments(self) -> tuple[str, ...]:
        """Return the segments in the order of a forward pass."""
        return tuple(
            segment for segment in SEGMENTS if any(one.segment == segment for one in self.storages)
        )

    def by_segment(self, layer: str | None = None) -> dict[str, int]:
        """Return the bytes of activations of a layer, or of the model, in each of the model's
        segments."""
        return {
            segment: self.bytes("activation", layer=layer, segment=segment)
            for segment in self.segments()
        }

    def by_kind(self, layer: str | None = None) -> dict[str, int]:
        """Return the bytes of a layer, or of the model, of each kind."""
        return {kind: self.bytes(kind, layer=layer) for kind in KINDS}


def profile_saved_tensors(
    model: nn.Module, run: Callable[[], Any], *, num_tokens: int = 0
) -> SavedTensors:
    """Call `run`, which does the forward pass of `model`, and list the tensors that it keeps for
    backward.

    Args:
        model: its parameters and buffers are the weights, its modules the places.
        run: returns the loss, or all tensors (also nested in containers and dataclasses) from which
            a backward pass would start.
        num_tokens: number of tokens that `run` processes, for bytes per token.

    The model is unchanged afterwards, also if `run` raises. The graph is freed.
    """
    recorder = _SavingHooks(model)
    with recorder.watch(), saved_tensors_hooks(recorder.pack, recorder.unpack):
        output = run()
    return SavedTensors(tuple(recorder.storages(output)), num_tokens)


def _rename(path: str, layers: Mapping[str, str]) -> str:
    """Replace the name of the layer in a dotted path, or in a layer with its segment."""
    for old, new in layers.items():
        if path == old or path.startswith((f"{old}.", f"{old} ")):
            return new + path[len(old) :]
    return path


def expand(profile: SavedTensors, kinds: Iterable[Sequence[str]]) -> SavedTensors:
    """Return the profile of a whole model, from that of a model with two layers of each kind.

    `kinds` has the layers of each kind of which there are several. The first two are in the
    profile; the others get a copy of the second one's storages. The second may use the first one's
    parameters, so weights and their copies are taken from the first. Activations are taken from the
    second, so that those that all layers share count once.
    """
    storages = list(profile.storages)
    for first, second, *others in kinds:
        storages = [one for one in storages if one.layer != second or one.kind == "activation"]
        storages += [
            one.renamed({first: second})
            for one in storages
            if one.layer == first and one.kind != "activation"
        ]
        of_second = [one for one in storages if one.layer == second]
        storages += [one.renamed({second: other}) for other in others for one in of_second]
    return SavedTensors(tuple(storages), profile.num_tokens)


class _Saved:
    """Replaces a saved tensor in the graph. Only the graph keeps it, and through it the storage,
    alive."""

    def __init__(self, tensor: Tensor, place: Place, copy_of: str) -> None:
        self.tensor = tensor.detach()  # an output with its graph would be a cycle
        self.storage = tensor.untyped_storage()
        self.place = place
        self.copy_of = copy_of


class _SavingHooks:
    """The state of one profile."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weight_names = {
            id(p): name for name, p in chain(model.named_parameters(), model.named_buffers())
        }
        is_decoder = all(hasattr(model, name) for name in OUTER_SEGMENTS if name != OUTSIDE)
        self.segment_of_layer = OUTER_SEGMENTS if is_decoder else {}
        self.places = [Place(OUTSIDE, self.segment_of_layer.get(OUTSIDE, OTHER), "")]
        self.saved: list[weakref.ref[_Saved]] = []
        self.mark = object()
        """Key of the place in a node's metadata; new in each profile, since nodes of the inputs of
        `run` may outlive it."""

    # --- hooks ---

    def pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self.places[-1], self._copied_weight(tensor.grad_fn))
        self.saved.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: _Saved) -> Tensor:
        return saved.tensor

    def _copied_weight(self, node: Node | None) -> str:
        """Return the parameter of which a tensor with this `grad_fn` is a copy."""
        while node is not None and REARRANGED.fullmatch(node.name()):
            node = node.next_functions[0][0]
        variable = getattr(node, "variable", None)
        return "" if variable is None else self.weight_names.get(id(variable), "")

    # --- places ---

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Make `self.places` follow the forward pass inside the block."""
        with contextlib.ExitStack() as stack:
            for path, module in self.model.named_modules():
                stack.callback(
                    module.register_forward_pre_hook(
                        partial(self._entering, path), with_kwargs=True
                    ).remove
                )
                leave = module.register_forward_hook(self._leaving, always_call=True)
                stack.callback(leave.remove)
                if all(callable(getattr(type(module), name, None)) for name in BLOCK_SEGMENTS):
                    for name in BLOCK_SEGMENTS:
                        stack.enter_context(self._wrapped(module, path, name))
            yield

    def _entering(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        outer, layer = self.places[-1], layer_of(path)
        self._mark((args, kwargs), outer)
        inherited = outer.segment if outer.layer == layer else OTHER
        self.places.append(Place(layer, self.segment_of_layer.get(layer, inherited), path))

    def _leaving(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._mark(output, self.places.pop())

    def _wrapped(
        self, module: nn.Module, path: str, name: str
    ) -> contextlib.AbstractContextManager[object]:
        """Replace the method of this module instance, inside the block, by one that records its
        place."""
        method, place = getattr(module, name), Place(layer_of(path), name, path)

        @wraps(method)
        def segment(*args: Any, **kwargs: Any) -> Any:
            self._mark((args, kwargs), self.places[-1])
            self.places.append(place)
            try:
                output = method(*args, **kwargs)
                self._mark(output, place)
            finally:
                self.places.pop()
            return output

        return patch.object(module, name, segment)

    def _mark(self, values: Any, place: Place) -> None:
        """Set the place of all nodes that lead to `values` and have none. Marks in the metadata,
        unlike a list, do not keep nodes alive."""
        for node in _nodes(values, lambda node: self.mark not in node.metadata):
            node.metadata[self.mark] = place

    # --- results ---

    def storages(self, output: Any) -> list[SavedStorage]:
        """Return the storages that are alive as long as `output` is."""
        names, attributes = self._name(output)
        alive = [one for reference in self.saved if (one := reference()) is not None]
        groups: dict[int, list[_Saved]] = {}
        for one in chain(alive, attributes):
            groups.setdefault(id(one.storage), []).append(one)
        weights = [
            (p.untyped_storage(), name)
            for name, p in chain(self.model.named_parameters(), self.model.named_buffers())
        ]
        weight_of = {id(storage): name for storage, name in weights}
        return [_summary(group, names, weight_of.get(key, "")) for key, group in groups.items()]

    def _name(self, output: Any) -> tuple[dict[int, str], list[_Saved]]:
        """Return the names of the saved tensors that `output` reaches, by id, and the tensors that
        custom Functions keep as attributes."""
        names: dict[int, str] = {}
        attributes = []
        found: dict[Any, None] = {}
        for node in _nodes(output, lambda node: node not in found):
            found[node] = None
        for node in reversed(found):  # roughly in the order of creation
            place = node.metadata.pop(self.mark, self.places[0])
            for name in dir(node):
                if name.startswith(RAW):
                    for one in _packed(getattr(node, name, None)):
                        names[id(one)] = f"{node.name()}.{name.removeprefix(RAW)}".removesuffix(
                            ".tensors"
                        )
            for name, value in getattr(node, "__dict__", {}).items():
                for tensor in tensors_in(value):
                    attributes.append(_Saved(tensor, place, ""))
                    names[id(attributes[-1])] = f"{node.name()}.{name}"
        return names, attributes


def _summary(group: Sequence[_Saved], names: Mapping[int, str], weight: str) -> SavedStorage:
    first = group[0]
    here = f"{first.place.layer} {first.place.segment}"
    places = dict.fromkeys(f"{one.place.layer} {one.place.segment}" for one in group)
    return SavedStorage(
        **dataclasses.asdict(first.place),
        saved_by=names.get(id(first), ""),
        shape=tuple(first.tensor.shape),
        dtype=str(first.tensor.dtype).removeprefix("torch."),
        bytes=first.storage.nbytes(),
        kind="weight" if weight else "weight copy" if first.copy_of else "activation",
        weight=weight or first.copy_of,
        num_saves=len(group),
        also_saved_in=tuple(place for place in places if place != here),
    )


def layer_of(path: str) -> str:
    """Return the layer of a module: its path up to the first number ("layers.3"), else its first
    name ("norm"); OUTSIDE for the model itself."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return parts[0] or OUTSIDE


def _nodes(values: Any, is_new: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the nodes that lead to a tensor in `values` through others that are new. The caller
    makes each known before the next.

    They are of torch's class `Node`, whose stub declares the dictionary `metadata` as a method.
    """
    ahead = [tensor.grad_fn for tensor in tensors_in(values)]
    while ahead:
        node = ahead.pop()
        if node is not None and is_new(node):
            yield node
            ahead.extend(parent for parent, _ in node.next_functions)


def _packed(raw: Any) -> Iterator[_Saved]:
    """Yield the hook's results for a raw saved tensor, or for several."""
    for one in raw if isinstance(raw, (tuple, list)) else (raw,):
        if isinstance(packed := getattr(one, "data", None), _Saved):
            yield packed
