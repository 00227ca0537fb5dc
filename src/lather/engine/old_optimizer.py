"""The optimizer of runs whose `[optim]` is an `OldOptimConfig` (`lather.config.old_runs`), reproduced to the bit."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from lather.config.old_runs import OldOptimConfig
from lather.config.optim import OptimConfig
from lather.optim import SOAP, parameter_groups
from lather.parallel.local_parameters import LocalParameters


def build_old_optimizer(config: OldOptimConfig, parameters: LocalParameters | list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Build SOAP for matrices and experts with AdamW for the rest, or torch's AdamW for everything, as before `OptimConfig`."""
    if config.name == "adamw":
        named = parameters.named() if isinstance(parameters, LocalParameters) else parameters
        own: dict[str, Any] = {"betas": config.adam_betas, "eps": config.eps, "weight_decay": config.weight_decay}
        return torch.optim.AdamW(named, lr=config.peak_lr, **own, fused=True)
    groups = parameter_groups(parameters.spread() if isinstance(parameters, LocalParameters) else parameters)
    for group in groups:
        group.update({"betas": config.adam_betas} if group.get("rule") == "adamw" else {"sides": "both"})
    others = {one.name for one in fields(OptimConfig)} - {"lr"} | {"adam_betas"}
    return SOAP(groups, **{name: value for name, value in asdict(config).items() if name not in others}, nonfinite="ignore")
