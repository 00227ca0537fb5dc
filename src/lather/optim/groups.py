"""Parameter groups of a model: matrices, stacked experts, and the rest."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lather.optim.description import Decisions, alike, name_of
from lather.optim.kinds import KINDS, GivenNames, Named, decide
from lather.optim.plain import converted

EXPERT_NAMES = ("experts",)
ADAM_NAMES = ("embed_tokens", "lm_head")
MAX_GUESSES_SHOWN = 8


def parameters_by_kind(
    model: nn.Module | Named,
    *,
    expert_names: Sequence[str] = EXPERT_NAMES,
    adam_names: Sequence[str] = ADAM_NAMES,
    router_names: Sequence[str] = (),
    matrix_names: Sequence[str] = (),
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Divide the parameters of a model, with their names, by kind: matrices, experts, router, rest.

    Tied parameters occur once; frozen parameters are included, because they may be trained later.
    The first of these that says something about a parameter decides:

    1. The caller. Names are whole parts of a parameter's name, one or several: `lm_head`,
       `mlp.gate`. `router_names` are routers, `adam_names` are rest, `matrix_names` are matrices if
       they have two dims or more. Parameters of three dims or more named by `expert_names` are
       experts, but their biases, norms and scales are rest, also those of two dims.
    2. Parameters of fewer than two dims are rest.
    3. The module that owns the parameter. Rest: `nn.Embedding`, `nn.EmbeddingBag`, tied or not;
       what a model's `get_output_embeddings()` and, if it is no linear map,
       `get_input_embeddings()` return; modules of a class whose name ends in Embedding or has
       Norm in it; depthwise convolutions. Matrices: weights of linear maps (`nn.Linear`,
       `nn.Bilinear`, other convolutions, `nn.MultiheadAttention`, recurrent modules, and classes
       whose name says Linear, Conv, Dense or MLP).
    4. The shape. Parameters with at most one dim longer than 1 are rest, unless their name says
       that they belong to a matrix product.
    5. The name. Rest: biases, norms, scales, positions, embeddings, tokens, queries and latents,
       state space models' A_log, D and dt. Matrices: weights, kernels, projections, `w1`, `lora_A`.
    6. A table (1, n, d) is rest; all others are matrices, which is a guess.

    It is also a guess that linear maps are matrices whose name says head, output or classifier,
    outside of stacks of layers, and stacks of three dims whose name says experts or moe, although
    `expert_names` does not name them. Named parameters have no owners: their shapes and names alone
    decide. `describe_parameters` shows every decision with its reason.

    Raises:
        TypeError: if `model` is no module and does not consist of names and parameters, or names
            are given as one string.
        ValueError: for parameters of lazy modules that have no shape yet, and for flat pieces of
            FSDP1 (`FullyShardedDataParallel`), whose kinds their shapes do not tell.

    Warns:
        UserWarning: once, naming the trained parameters for which the answer is a guess.
    """
    names = GivenNames(router_names, adam_names, matrix_names, expert_names)
    return _by_kind(model, names)


def describe_parameters(
    model: nn.Module | Named,
    *,
    expert_names: Sequence[str] = EXPERT_NAMES,
    adam_names: Sequence[str] = ADAM_NAMES,
    router_names: Sequence[str] = (),
    matrix_names: Sequence[str] = (),
) -> Decisions:
    """Return what `parameters_by_kind` decides with the same arguments, and why.

    `print(describe_parameters(model))` prints a table of at most 80 columns: each kind with its
    parameters by reason, with shapes and numbers of elements. Equal layers share a line; guesses
    are marked. The result is a tuple with a decision for each
    parameter: its `name`, `parameter`, `kind`, `reason` and `is_guess`.
    """
    names = GivenNames(router_names, adam_names, matrix_names, expert_names)
    return Decisions(decide(model, names))


def _by_kind(
    model: nn.Module | Named, names: GivenNames
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Divide the parameters by kind, and warn once of all guesses about parameters that are
    trained, at the line that called the caller."""
    decisions = decide(model, names)
    kinds: dict[str, list[tuple[str, nn.Parameter]]] = {kind: [] for kind in KINDS}
    for decision in decisions:
        kinds[decision.kind].append((decision.name, decision.parameter))
    guesses = alike(x for x in decisions if x.is_guess and x.parameter.requires_grad)
    if not guesses:
        return kinds
    shown = [f"{name_of(same)} ({same[0].kind}: {same[0].reason})" for same in guesses]
    if len(shown) > MAX_GUESSES_SHOWN:
        shown = [*shown[:MAX_GUESSES_SHOWN], f"and {len(shown) - MAX_GUESSES_SHOWN} more"]
    last = guesses[0][0].name.removesuffix(".weight").rpartition(".")[2]
    adam_names = ", ".join(map(repr, (*names.adam, last)))
    warnings.warn(
        f"the kind of these parameters is a guess: {'; '.join(shown)}. Say which are matrices and "
        f"which are not, for example matrix_names=({last!r},) or adam_names=({adam_names}), or "
        "make the groups by hand; print(describe_parameters(model)) shows all decisions",
        UserWarning,
        stacklevel=3,
    )
    return kinds


def parameter_groups(
    model: nn.Module | Named,
    *,
    expert_names: Sequence[str] = EXPERT_NAMES,
    adam_names: Sequence[str] = ADAM_NAMES,
    expert_layout: str = "per_expert",
    rest_rule: str = "adamw",
    rest_lr: float | None = None,
    matrix_names: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return parameter groups of a model, or of named parameters, for any optimizer of this
    package, such as `SOAP(parameter_groups(model))`.

    `parameters_by_kind`, with the same names, tells which parameters are in which group, by which
    rule, and what it warns of; `print(describe_parameters(model))` shows it. Matrices keep their
    shape; to those of three dims and more (convolutions) Muon and SOAPMuon give AdamW's step, at
    the rate of the matrices. Experts have `matrix_layout=expert_layout`: "per_expert", or "stacked"
    for `StackedSOAP`. Embeddings, heads, norms and biases have `rest_rule`: "adamw", or
    "embedding_soap", which learns faster from small batches; and the learning rate `rest_lr`, or
    that of the optimizer if it is None. (docs/optimizers.md has good rates.) In rules with bases,
    only the smaller side of a matrix has a basis if the other side is more than 8 times as long
    (`sides="auto"`): both sides of a 4096 x 8 LoRA matrix would need 770 times the memory of its
    weights. Frozen parameters are in their groups and take no step until they have gradients.

    Empty groups are left out. Groups contain the names of their parameters, which error messages
    then show.
    """
    kinds = _by_kind(model, GivenNames((), adam_names, matrix_names, expert_names))
    options: dict[str, dict[str, Any]] = {
        "matrices": {"matrix_layout": "tensor", "sides": "auto"},
        "experts": {"matrix_layout": expert_layout, "sides": "auto"},
        "rest": {"matrix_layout": "tensor", "rule": rest_rule},
    }
    if rest_lr is not None:
        options["rest"]["lr"] = converted(rest_lr, float | Tensor)
    return [{"params": kinds[kind], **options[kind]} for kind in options if kinds[kind]]
