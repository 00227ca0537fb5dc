"""Finds flat pieces of matrices, which a rule for matrices would take for vectors.

    FSDP1 (`FullyShardedDataParallel`)                    pieces with a mark of torch
    DeepSpeed's ZeRO, Megatron's distributed optimizer    vectors without a mark, in the groups

Marked pieces are refused, also where a model is sorted into kinds of parameters. Pieces without a
mark look like vectors, so only all parameters of a rule show something: a rule for matrices that
had matrices and has none now is refused, and a rule that never had any is named in a warning.
Elementwise rules are right on any piece.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lather.optim.batched.matrix_layout import Layout
from lather.optim.batched.roster import GroupSettings, names_of
from lather.optim.options import name_of
from lather.optim.rule import Matrix, Rule
from lather.torch_private import is_flattened

SHOWN = 4
"""Number of shapes that a message shows."""

NO_SHAPE = "has no shape yet: run the model once, so that lazy modules are initialized"
"""Part of the error of a parameter of a lazy module."""

REMEDY = "shard with fully_shard (FSDP2), or give the pieces an elementwise rule (rule='adamw')"


def is_for_matrices(rule: Rule) -> bool:
    """Whether the rule treats a matrix otherwise than each of its elements."""
    return not rule.on(Matrix((2, 2), 2)).elementwise


def is_matrix(layout: Layout) -> bool:
    """Whether a rule takes a parameter of this layout for one or more matrices, and does not leave
    it to an elementwise rule. Empty parameters count by their number of dims."""
    is_elementwise = layout.rule.elementwise and not layout.is_controlled
    return len(layout.shape) > 1 and (0 in layout.shape or not is_elementwise)


def check_not_flat(groups: Sequence[GroupSettings], had_matrices: Mapping[str, bool]) -> None:
    """Raise ValueError if a group whose rule needs matrices contains flat pieces of FSDP1, or if
    all matrices of a rule have become vectors.

    `had_matrices`: name of a rule -> whether it had matrices.
    """
    has_pieces = not keep_shapes(p for settings in groups for p in settings.group["params"])
    params: dict[str, list[Tensor]] = {}
    for settings in groups:
        if not (settings.rule.controls_matrices or is_for_matrices(settings.rule)):
            continue
        name = name_of(type(settings.rule))
        params.setdefault(name, []).extend(settings.group["params"])
        if has_pieces:
            for what, p in zip(names_of(settings.group), settings.group["params"], strict=True):
                check_piece(what, p, f"{name} needs whole matrices")
    for name, of_rule in params.items():
        # A vector without elements may be a weight that was moved away.
        present = [p for p in of_rule if p.dim() > 1 or p.numel()]
        if present and had_matrices.get(name) and not any(p.dim() > 1 for p in present):
            raise ValueError(
                f"{name} had matrices, and now has {shapes_of(of_rule)}: something has put flat "
                "pieces in their place, as DeepSpeed's ZeRO, FSDP1 and Megatron's distributed "
                f"optimizer do, and {name} would take them for vectors. Instead, {REMEDY}"
            )


def check_kinds(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError if the named parameters of a model contain flat pieces of FSDP1, of which
    nobody can tell whether they are matrices."""
    if not keep_shapes(p for _, p in named):
        for name, p in named:
            check_piece(f"parameter {name!r}", p, "the kind of a parameter depends on its shape")


def keep_shapes(params: Iterable[Tensor]) -> bool:
    """Whether parameters that FSDP1 has marked have kept their shapes, or there are none.

    FSDP1 marks the vectors of a model, too. If a marked parameter is a matrix, then all parameters
    have kept their shapes: `NO_SHARD` with `use_orig_params=True` does that.
    """
    marked = list(filter(is_flattened, params))
    return not marked or any(p.dim() > 1 for p in marked)


def check_piece(what: str, p: Tensor, need: str) -> None:
    """Raise ValueError if the parameter is a flat piece that FSDP1 has made. `what` names the
    parameter, and `need` says why the whole parameter is needed."""
    if is_flattened(p) and p.dim() < 2:
        raise ValueError(
            f"{what} with shape {tuple(p.shape)} is a flat piece that FullyShardedDataParallel "
            f"(FSDP1) has made, but {need}: {REMEDY}. In accelerate, FSDP2 is fsdp_version: 2"
        )


def shapes_of(params: Sequence[Tensor]) -> str:
    """Return the number of the parameters and their shapes in words."""
    shapes = list(dict.fromkeys(str(tuple(p.shape)) for p in params))
    shown = ", ".join([*shapes[:SHOWN], *["..."] * (len(shapes) > SHOWN)])
    return f"{len(params)} parameter{'s' * (len(params) > 1)} of shape {shown}"


def warn_without_matrices(
    groups: Sequence[Mapping[str, Any]],
    had_matrices: Mapping[str, bool],
    default: Rule,
) -> None:
    """Warn of each rule (the keys of `had_matrices`: all rules for matrices) whose groups together
    have parameters and no matrix, and of the default rule if it is a rule for matrices and all
    groups with parameters, of which none has two dims, have elementwise rules.

    There is no warning of a rule other than the `default` rule beside matrices of another rule:
    norms without embeddings under `rest_rule="embedding_soap"`.
    """
    name_of_default = name_of(type(default))
    for name, has_matrices in had_matrices.items():
        params = [p for group in groups if group["rule"] == name for p in group["params"]]
        is_beside_matrices = name != name_of_default and any(had_matrices.values())
        if params and not has_matrices and not is_beside_matrices:
            _warn(
                name,
                params,
                "they take its step for vectors, which is AdamW's at "
                f"{name}'s learning rate for all rules of lather.optim." + _remedies(params),
            )
    params = [p for group in groups for p in group["params"]]
    names = {group["rule"] for group in groups if group["params"]}
    is_flat = bool(params) and all(p.dim() < 2 for p in params)
    if is_flat and is_for_matrices(default) and names.isdisjoint(had_matrices):
        _warn(
            name_of_default,
            params,
            f"all groups have other rules ({', '.join(sorted(names))}). If these are flat pieces "
            "of matrices (DeepSpeed's ZeRO, Megatron's distributed optimizer), shard with "
            "fully_shard (FSDP2); if not, take AdamW, or the optimizer of their rule, which needs "
            "no matrices.",
        )


def _remedies(params: Sequence[Tensor]) -> str:
    """Say what to do about parameters of a rule for matrices that are none."""
    dims, text = {p.dim() for p in params}, ""
    if 3 in dims:
        text += " Stacks of matrices need matrix_layout='per_expert' or 'stacked'."
    if max(dims) > 3:
        text += (
            " Convolutions and other tensors of four dims and more belong into a group with "
            "rule='adamw' and a learning rate of its own, or under SOAP, KLSOAP or REKLS with "
            "matrix_layout='tensor'."
        )
    if min(dims) < 2:
        text += (
            " If they are flat pieces of matrices (DeepSpeed's ZeRO, Megatron's distributed "
            f"optimizer), {REMEDY}; vectors belong into a group with rule='adamw'."
        )
    return text


def _warn(name: str, params: Sequence[Tensor], text: str) -> None:
    """Warn of a rule without matrices, at the line that made the optimizer."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("lather.optim."):
        frame, level = frame.f_back, level + 1
    none = f"{name} is a rule for matrices, but has none among {shapes_of(params)}"
    warnings.warn(f"{none}: {text}", UserWarning, stacklevel=level + 1)
