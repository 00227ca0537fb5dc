"""A model's parameters as optimizer groups: matrices, stacked experts, and the rest, each parameter claimed exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

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
    """Parameters with their names, each claimed once (tied ones, too), by kind; frozen ones as well, for they may be thawed.

    - experts: three or more dims and a component of the name in `expert_names`;
    - router: a component of the name in `router_names`;
    - rest: fewer than two dims, stacked biases of experts (E, n), the weights of `nn.Embedding`, and whatever has a component of its name
      in `adam_names` (embeddings and heads gain nothing from a factor over the vocabulary);
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
) -> list[dict[str, Any]]:
    """Groups for `SOAP(parameter_groups(model))`, or any other optimizer here, of a model or of parameters with names.

    Matrices as they are, experts under `matrix_layout=expert_layout` ("per_expert", or "stacked" for `StackedSOAP`), and `rest_rule` for
    embeddings, heads, norms and biases: "adamw", or "embedding_soap", which learns faster from small batches; `parameters_by_kind`
    says which is which. A rule with bases takes the smaller side of a matrix alone where the other is more than 8 times as long
    (`sides="auto"`): LoRA's 4096 x 8 adapters would keep 1,026 times their weights. Frozen parameters are in their groups and take no step
    until they have gradients.

    Empty groups are left out. Groups carry the parameters' names, which errors then show.
    """
    kinds = parameters_by_kind(model, expert_names=expert_names, adam_names=adam_names)
    options: dict[str, dict[str, Any]] = {
        "matrices": {"matrix_layout": "tensor", "sides": "auto"},
        "experts": {"matrix_layout": expert_layout, "sides": "auto"},
        "rest": {"matrix_layout": "tensor", "rule": rest_rule},
    }
    return [{"params": kinds[kind], **own} for kind, own in options.items() if kinds[kind]]
