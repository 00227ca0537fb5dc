"""A model's parameters as optimizer groups: matrices, stacked experts, and the rest, each parameter claimed exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

EXPERT_NAMES = ("experts",)
ADAM_NAMES = ("embed_tokens", "lm_head")


def parameter_groups(
    model: nn.Module | Iterable[tuple[str, nn.Parameter]],
    *,
    expert_names: Sequence[str] = EXPERT_NAMES,
    adam_names: Sequence[str] = ADAM_NAMES,
    expert_layout: str = "per_expert",
) -> list[dict[str, Any]]:
    """Groups for `SOAP(parameter_groups(model))`, of a model or of parameters with names. A parameter that does not require a gradient is
    left out, a tied one counted once.

    - matrices: two or more dims, preconditioned as they are (`matrix_layout="tensor"`);
    - experts: three or more dims and a component of the name in `expert_names` (`matrix_layout=expert_layout`: "per_expert", or
      "stacked" for `StackedSOAP`);
    - the rest, AdamW (`max_precond_dim=0`): fewer than two dims, stacked biases of experts (E, n), the weights of `nn.Embedding`, and
      whatever has a component of its name in `adam_names` (embeddings and heads gain nothing from a factor over the vocabulary).

    Empty groups are left out. Groups carry the parameters' names, which errors then show.
    """
    embeddings: set[int] = set()
    if isinstance(model, nn.Module):
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        model = model.named_parameters()
    kinds: dict[str, list[tuple[str, nn.Parameter]]] = {"matrices": [], "experts": [], "rest": []}
    for name, p in model:
        if p.requires_grad:
            components = set(name.split("."))
            is_expert = bool(components & set(expert_names))
            is_vector = p.dim() < 2 or (is_expert and p.dim() == 2 and "bias" in name.rpartition(".")[2])
            if is_vector or id(p) in embeddings or components & set(adam_names):
                kinds["rest"].append((name, p))
            elif p.dim() > 2 and is_expert:
                kinds["experts"].append((name, p))
            else:
                kinds["matrices"].append((name, p))
    options: dict[str, dict[str, Any]] = {
        "matrices": {"matrix_layout": "tensor"},
        "experts": {"matrix_layout": expert_layout},
        "rest": {"matrix_layout": "tensor", "rule": "adamw"},
    }
    return [{"params": params, **options[kind]} for kind, params in kinds.items() if params]
