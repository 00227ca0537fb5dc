"""Parameter groups of a model: matrices, stacked experts, and the rest. Each parameter is in exactly one group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from lather.optim.plain import plain

EXPERT_NAMES = ("experts",)
ADAM_NAMES = ("embed_tokens", "lm_head")

KINDS = ("matrices", "experts", "router", "rest")

Named = Iterable[tuple[str, nn.Parameter]]


def parameters_by_kind(
    model: nn.Module | Named,
    *,
    expert_names: Sequence[str] = EXPERT_NAMES,
    adam_names: Sequence[str] = ADAM_NAMES,
    router_names: Sequence[str] = (),
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Divide the parameters of a model, with their names, by kind. Tied parameters occur once; frozen ones are included, because they may
    be trained later.

    - experts: parameters of three or more dims with a component of their name in `expert_names`;
    - router: parameters with a component of their name in `router_names`;
    - rest: parameters of fewer than two dims, stacked biases of experts (E, n), the weights of `nn.Embedding`, and parameters with a
      component of their name in `adam_names` (embeddings and heads gain nothing from a factor over the vocabulary);
    - matrices: all others.
    """
    embeddings: set[int] = set()
    if isinstance(model, nn.Module):
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        model = model.named_parameters()
    kinds: dict[str, list[tuple[str, nn.Parameter]]] = {kind: [] for kind in KINDS}
    for name, p in model:
        components = set(name.split("."))
        is_expert = bool(components & set(expert_names))
        is_vector = p.dim() < 2 or (is_expert and p.dim() == 2 and "bias" in name.rpartition(".")[2])
        if components & set(router_names):
            kinds["router"].append((name, p))
        elif is_vector or id(p) in embeddings or components & set(adam_names):
            kinds["rest"].append((name, p))
        else:
            kinds["experts" if p.dim() > 2 and is_expert else "matrices"].append((name, p))
    return kinds


def parameter_groups(
    model: nn.Module | Named,
    *,
    expert_names: Sequence[str] = EXPERT_NAMES,
    adam_names: Sequence[str] = ADAM_NAMES,
    expert_layout: str = "per_expert",
    rest_rule: str = "adamw",
    rest_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups of a model, or of named parameters, for `SOAP(parameter_groups(model))` or any other optimizer of this
    package.

    `parameters_by_kind` tells which parameters are in which group. Matrices keep their shape. Experts have `matrix_layout=expert_layout`:
    "per_expert", or "stacked" for `StackedSOAP`. Embeddings, heads, norms and biases have `rest_rule`: "adamw", or "embedding_soap", which
    learns faster from small batches; and the learning rate `rest_lr`, or that of the optimizer if it is None. (docs/optimizers.md has good
    rates.) In rules with bases, only the smaller side of a matrix has one if the other is more than 8 times as
    long (`sides="auto"`): both sides of a 4096 x 8 LoRA matrix would need 1,026 times the memory of its weights. Frozen parameters are in
    their groups and take no step until they have gradients.

    Empty groups are left out. Groups contain the names of their parameters, which error messages then show.
    """
    kinds = parameters_by_kind(model, expert_names=expert_names, adam_names=adam_names)
    options: dict[str, dict[str, Any]] = {
        "matrices": {"matrix_layout": "tensor", "sides": "auto"},
        "experts": {"matrix_layout": expert_layout, "sides": "auto"},
        "rest": {"matrix_layout": "tensor", "rule": rest_rule},
    }
    if rest_lr is not None:
        options["rest"]["lr"] = plain(rest_lr)
    return [{"params": kinds[kind], **own} for kind, own in options.items() if kinds[kind]]
