"""Decides which parameters of a model are matrices, and why.

A matrix rule (Muon, SOAP) is made for the weights of linear maps, by which activations are
multiplied. Published practice leaves all others to AdamW: embeddings, the output head, vectors
(https://kellerjordan.github.io/posts/muon/, Moonlight, torch.optim.Muon). A step of a matrix rule
on a table or on a stack of vectors raises no error; the model only learns badly. Therefore every
decision has a reason, and is marked where it is a guess.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lather.optim.batched.flat import NO_SHAPE, check_kinds
from lather.optim.parameter_names import (
    OF_A_VECTOR,
    PRODUCT,
    WEIGHT,
    Judgment,
    has_parts,
    is_low_rank,
    is_product,
    is_weight,
    judge,
    judge_module,
    may_be_experts,
    may_be_head,
    words_of,
)

KINDS = ("matrices", "experts", "router", "rest")

Named = Iterable[tuple[str, nn.Parameter]]

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
LINEAR_MAPS = (
    *(nn.Linear, nn.Bilinear, *CONVOLUTIONS),
    *(nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
)
CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)
"""Modules that only hold parameters for the module in which they are."""
_CLASS_WORDS = re.compile(
    r"(?P<linear>linear|conv|mlp|dense|feedforward)"
    r"|(?P<norm>norm(?!al(?!iz|is)))"
    r"|(?P<embedding>emb(ed(ding)?s?)?(bag|table)?\d*$)",
    re.IGNORECASE,
)


@dataclass(frozen=True, eq=False)
class Decision:
    """The kind of a parameter, with the reason."""

    name: str
    """Name of the parameter in the model."""
    parameter: nn.Parameter
    kind: str
    """matrices, experts, router or rest."""
    reason: str
    """Why, in words."""
    is_guess: bool = False
    """Whether neither the caller nor the owner nor shape or name settles it."""


class GivenNames(NamedTuple):
    """Names from the caller, each a part or several parts of a parameter's name."""

    router: Sequence[str]
    adam: Sequence[str]
    matrix: Sequence[str]
    expert: Sequence[str]


class OwningModule(NamedTuple):
    """A module that has a parameter, and the name that the parameter has in it."""

    path: str
    module: nn.Module
    attribute: str
    """Several parts if the parameter is in a container of the module."""
    is_length: bool = False
    """Whether it is the first of several originals of a parametrized tensor, which are the lengths
    of rows if these are normalized."""


def decide(model: nn.Module | Named, by_caller: GivenNames) -> list[Decision]:
    """Decide for each parameter of a model, or for named parameters, in their order.

    Raises:
        TypeError: for something that is neither a module nor pairs of a name and a parameter, and
            for names that are not a sequence of strings.
    """
    for field, names in zip(by_caller._fields, by_caller, strict=True):
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"{field}_names={names!r} must be a sequence of strings, such as "
                f"{field}_names=({names if isinstance(names, str) else 'name'!r},)"
            )
    owners: Mapping[int, list[OwningModule]] = {}
    embeddings: dict[int, str] = {}
    if isinstance(model, nn.Module):
        named, owners = list(model.named_parameters()), owners_of(model)
        for end in ("input", "output"):
            embeddings |= dict.fromkeys(_returned_by(model, f"get_{end}_embeddings"), end)
    else:
        named = [_checked_pair(pair) for pair in model]
    check_kinds(named)
    judgments = (
        _judge(name, p, owners.get(id(p), []), embeddings.get(id(p)), by_caller)
        for name, p in named
    )
    return [Decision(name, p, *x) for (name, p), x in zip(named, judgments, strict=True)]


def _checked_pair(pair: object) -> tuple[str, nn.Parameter]:
    if isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str):
        return pair[0], pair[1]
    raise TypeError(
        f"a {type(pair).__name__} has no name, and kinds depend on names: give the model or "
        "model.named_parameters() in place of model.parameters()"
    )


def owners_of(model: nn.Module) -> dict[int, list[OwningModule]]:
    """Return the modules that own each parameter, by the parameter's id; several if it is tied.

    Lists and dictionaries of parameters, and parametrizations, count as parts of the module in
    which they are.
    """
    modules = dict(model.named_modules())
    owners: dict[int, list[OwningModule]] = defaultdict(list)
    for path, module in modules.items():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[id(p)].append(_owner(modules, path, name))
    return owners


def _owner(modules: Mapping[str, nn.Module], path: str, name: str) -> OwningModule:
    attribute, is_length = name, False
    while path and isinstance(modules[path], CONTAINERS):
        path, _, part = path.rpartition(".")
        attribute = f"{part}.{attribute}"
    parts = attribute.split(".")
    if parts[0] == "parametrizations" and parts[-1].startswith("original"):
        attribute, is_length = parts[1], parts[-1] == "original0"
    return OwningModule(path, modules[path], attribute, is_length)


def _returned_by(model: nn.Module, method: str) -> set[int]:
    """Return the ids of the embedding's parameters that a method of Hugging Face's models returns.

    All modules are asked, because a model may be part of another. Many models have the method and
    no embedding: then it raises NotImplementedError or returns None.
    """
    returned: set[int] = set()
    for module in model.modules():
        try:
            embedding = getattr(module, method)()
        except (AttributeError, NotImplementedError, TypeError):
            continue
        if isinstance(embedding, nn.Parameter):
            returned.add(id(embedding))
        elif isinstance(embedding, nn.Module):
            returned.update(map(id, embedding.parameters()))
    return returned


def _judge(
    name: str,
    p: nn.Parameter,
    owners: Sequence[OwningModule],
    embedding: str | None,
    by_caller: GivenNames,
) -> Judgment:
    """Judge a parameter: by the caller's names, its owners, its shape, its name."""
    if isinstance(p, nn.UninitializedParameter):
        raise ValueError(f"{name} {NO_SHAPE}, then make the groups")
    shape = tuple(p.shape)
    judgment = _by_caller(name, shape, by_caller)
    if judgment is None and len(shape) < 2:
        judgment = Judgment("rest", "fewer than two dims")
    judgment = judgment or _by_owners(name, shape, owners, embedding)
    if judgment is None and _is_vector(shape):
        judgment = _vector(name, owners)
    return judgment or _by_name(name, shape, owners)


def _by_caller(name: str, shape: tuple[int, ...], names: GivenNames) -> Judgment | None:
    if (part := has_parts(name, names.router)) is not None:
        return Judgment("router", f"{part!r} is in router_names")
    if (part := has_parts(name, names.adam)) is not None:
        return Judgment("rest", f"{part!r} is in adam_names")
    if len(shape) >= 2 and (part := has_parts(name, names.matrix)) is not None:
        return Judgment("matrices", f"{part!r} is in matrix_names")
    if (part := has_parts(name, names.expert)) is None:
        return None
    vectors = [why for word in words_of(name.rpartition(".")[2]) if (why := OF_A_VECTOR.get(word))]
    if len(shape) >= 2 and vectors:
        return Judgment("rest", f"a stack of vectors of experts: {vectors[0]}")
    if len(shape) > 2:
        return Judgment("experts", f"a stack of matrices, and {part!r} is in expert_names")
    return None


def _is_vector(shape: tuple[int, ...]) -> bool:
    return sum(size > 1 for size in shape) < 2


def _by_owners(
    name: str,
    shape: tuple[int, ...],
    owners: Sequence[OwningModule],
    embedding: str | None,
) -> Judgment | None:
    """Judge a parameter by the modules that own it.

    A model's input embedding may be a linear map of patches or of frames; its head is always a
    linear map.
    """
    for owner in owners:
        if isinstance(owner.module, nn.Embedding | nn.EmbeddingBag):
            return Judgment("rest", f"of {_class_name(owner, nn.Embedding, nn.EmbeddingBag)}")
    linear = next(filter(None, (_by_linear_owner(name, shape, owner) for owner in owners)), None)
    if embedding == "output" or (embedding == "input" and linear is None):
        return Judgment("rest", f"the model's get_{embedding}_embeddings() returns it")
    return linear or next(filter(None, map(_by_class_name, owners)), None)


def _by_linear_owner(name: str, shape: tuple[int, ...], owner: OwningModule) -> Judgment | None:
    """Judge the weight of a linear map, None for any other parameter.

    The name of a class does not suffice for a vector: a `ConvNextV2GRN` is a normalization.
    """
    module, what = owner.module, _class_name(owner, *LINEAR_MAPS)
    if not isinstance(module, LINEAR_MAPS):
        word, what = _class_word(module)
        if word != "linear" or _is_vector(shape):
            return None
    if owner.is_length or not is_weight(owner.attribute):
        return None
    groups, channels = getattr(module, "groups", 1), getattr(module, "in_channels", None)
    if isinstance(groups, int) and groups > 1 and channels is not None:
        if channels == groups:
            return Judgment("rest", f"depthwise convolution ({what}): a filter for each channel")
        return Judgment("matrices", f"grouped convolution ({what}), as one tensor")
    if may_be_head(name):
        return Judgment("matrices", f"weight of {what}; it may be the output head", True)
    return Judgment("matrices", f"weight of {what}")


def _by_class_name(owner: OwningModule) -> Judgment | None:
    """Judge a parameter of a module whose class's name says embedding or normalization."""
    word, what = _class_word(owner.module)
    if word in (None, "linear") or judge(owner.attribute) is PRODUCT:
        return None
    return Judgment("rest", f"of {what}, whose name says {word}")


def _class_word(module: nn.Module) -> tuple[str | None, str]:
    """Return the word in the name of a module's class (linear, norm, embedding), and that name.

    The last word counts: a LayerNormLinear is linear. A class without any of these words has those
    of its base classes: FSDP2 and parametrizations derive classes.
    """
    for cls in type(module).__mro__:
        if cls is nn.Module:
            break
        if words := [match.lastgroup for match in _CLASS_WORDS.finditer(cls.__name__)]:
            return words[-1], cls.__name__
    return None, type(module).__name__


def _class_name(owner: OwningModule, *classes: type[nn.Module]) -> str:
    """Return the name in torch of the class of a module that is an instance of one of `classes`, ""
    of any other: nn.LSTM for an LSTM, nn.Linear also for the classes that FSDP2 makes of it."""
    if not isinstance(owner.module, classes):
        return ""
    names = (cls.__name__ for cls in type(owner.module).__mro__ if issubclass(cls, classes))
    return next(f"nn.{name}" for name in names if hasattr(nn, name))


def _vector(name: str, owners: Sequence[OwningModule]) -> Judgment | None:
    """Judge a parameter of two dims or more of which at most one is longer than 1."""
    reason = "at most one dim is longer than 1"
    if any(owner.is_length for owner in owners):
        return Judgment("rest", reason)
    if is_product(name) or any(is_product(owner.attribute) for owner in owners):
        return None
    return Judgment("rest", reason, not owners and name.rpartition(".")[2] == "weight")


def _by_name(name: str, shape: tuple[int, ...], owners: Sequence[OwningModule]) -> Judgment:
    """Judge a parameter whose owners say nothing."""
    if is_low_rank(name):
        return Judgment("matrices", "a factor of a low-rank adapter, by its name")
    parts = [part for part in name.split(".") if not part.isdigit()]
    paths = [owner.attribute for owner in owners] or [(parts or [name])[-1]]
    judgments = [judgment for path in paths if (judgment := judge(path)) is not None]
    judgment = min(judgments, key=lambda judgment: judgment.kind != "rest", default=None)
    is_matrix = judgment is None or judgment.kind == "matrices"
    if len(shape) == 3 and is_matrix and may_be_experts(name):
        return Judgment("matrices", "it may be a stack of experts: name it in expert_names", True)
    if judgment is WEIGHT:
        return _weight_of_unknown(name, shape, parts)
    if judgment is not None:
        return judgment
    if not owners and len(parts) > 1 and (judgment := judge(parts[-2])) is not None:
        return judgment._replace(is_guess=True)
    if len(shape) > 2 and all(size == 1 for size in shape[:-2]):
        return Judgment("rest", "a table, by its shape of (1, n, d)")
    return Judgment("matrices", "neither owner nor name says what it is", True)


def _weight_of_unknown(name: str, shape: tuple[int, ...], parts: Sequence[str]) -> Judgment:
    """Judge a weight whose owner is of no known class, or unknown."""
    module = parts[-2] if len(parts) > 1 and parts[-1] == "weight" else ""
    is_convolution = len(shape) > 2 and "conv" in module.lower()
    if is_convolution and shape[1] == 1:
        return Judgment("rest", "depthwise convolution, by its name and shape", True)
    if len(shape) == 2 and (judgment := judge_module(module)) is not None:
        return judgment
    if may_be_head(name):
        return Judgment("matrices", "it may be the output head, by its name", True)
    return WEIGHT
