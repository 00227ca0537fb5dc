"""The optimizer of a run, with one group for each kind of parameters and its rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from lather.config.config import Config
from lather.config.optim import OptimConfig
from lather.engine.trained_parameters import outline
from lather.optim import MatrixOptimizer, parameters_by_kind
from lather.optim.batched.remainders import REMAINDER, remainder_of
from lather.optim.groups import ADAM_NAMES
from lather.optim.optimizers import OPTIMIZER_OF
from lather.optim.options import options_of
from lather.parallel.local_parameters import LocalParameters

LR_FACTOR = "lr_factor"
"""Key of a group: its learning rate as a factor of `optim.lr` at every step."""
KIND = "kind"
"""Key of a group: the kind of its parameters."""
ROUTERS = ("gate", "shared_expert_gate")
"""Name components that identify the parameters of routers and of the shared experts' gates."""
NO_MATRICES = (*ADAM_NAMES, "conv1d")
"""Name components of embeddings, heads, and convolutions that have a filter for each channel."""


def head_rows(config: Config) -> dict[str, int]:
    """Return the rows of a head in each parameter that `optim.per_head` divides into heads, by
    name; nothing without that option."""
    return head_rows_of(outline(config)) if config.optim.per_head else {}


def head_rows_of(model: nn.Module) -> dict[str, int]:
    """Return the rows of a head in each parameter of a model whose rows are those of heads, by
    name: what the modules say of their projections in `head_rows`."""
    return {
        f"{path}.{name}.weight": rows
        for path, module in model.named_modules()
        for name, rows in getattr(module, "head_rows", {}).items()
    }


def build_optimizer(
    config: OptimConfig,
    parameters: LocalParameters | Iterable[tuple[str, nn.Parameter]],
    heads: Mapping[str, int] | None = None,
) -> MatrixOptimizer:
    """Build the optimizer for the rule of `[optim]`, whose groups have the rules of their kinds.

    `parameters`: those of a rank, or all of a model in one process with their names; frozen
    parameters are skipped. For fp64 parameters the state of elementwise rules is fp64. `heads`:
    what `head_rows` returns, needed for `per_head`.
    """
    for kind, name, fraction in config.fractions():
        raise ValueError(
            f"optim.{kind and f'{kind}.'}{name} = {fraction} is a fraction of a run of unknown "
            "length: use Config.resolved(), or give a number of steps"
        )
    assert heads is not None or not config.per_head
    heads = heads if heads and config.per_head else {}
    if isinstance(parameters, LocalParameters):
        trained = parameters.trained().spread()
    else:
        trained = [(name, p) for name, p in parameters if p.requires_grad]
    groups = []
    for kind, named in parameters_by_kind(
        trained, router_names=ROUTERS, adam_names=NO_MATRICES
    ).items():
        if not named:
            continue
        rule = config.rule_of(kind)
        if (
            rule.elementwise
            and rule.state_dtype == torch.float32
            and all(p.dtype == torch.float64 for _, p in named)
        ):
            rule = replace(rule, state_dtype=torch.float64)
        factor = config.lr_of(kind) / config.peak_lr if config.peak_lr else 1.0
        keys = {"rule": rule, "lr": rule.lr, LR_FACTOR: factor, KIND: kind}
        for size, params in _by_head_size(named, heads if kind == "matrices" else {}):
            layout = {"matrix_layout": "per_head", "head_rows": size} if size else {}
            groups.append({"params": params, **keys, **layout})
    # a rank whose layers are all frozen still takes part in steps
    groups = groups or [{"params": [], KIND: "rest"}]
    # checkpoints store the class name
    default, optimizer = (
        config.rule,
        OPTIMIZER_OF.get(type(config.rule)),
    )
    options = {name: getattr(default, name) for name in options_of(type(default))}
    made = optimizer(groups, **options) if optimizer else MatrixOptimizer(groups, default)
    if isinstance(parameters, LocalParameters) and parameters.remainders:
        made.init_state()
        for p, r in parameters.remainders.items():
            if REMAINDER in made.state.get(p, {}):
                remainder_of(made.state[p]).copy_(r)
        parameters.remainders.clear()
    return made


def _by_head_size(
    named: Iterable[tuple[str, nn.Parameter]], heads: Mapping[str, int]
) -> Iterable[tuple[int, list[tuple[str, nn.Parameter]]]]:
    """Divide parameters by the rows of a head; 0 for those without heads."""
    divided: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, p in named:
        divided.setdefault(heads.get(name, 0), []).append((name, p))
    return divided.items()
