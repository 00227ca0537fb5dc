"""Choices of a configuration for an engine: schedules, the dtype of weights, and how experts keep
activations and balance their load."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lather.config.config import Config, MoEConfig, ParallelConfig
from lather.device import gpu_module, is_nvidia
from lather.errors import ConfigError
from lather.kernels.block_scaled import multiplies_in_fp8
from lather.models.context import Context
from lather.models.decoder import RoutedModel
from lather.models.experts import Experts
from lather.pipeline.schedule import Schedule, dualpipev, sequential


def schedule_for(parallel: ParallelConfig, num_micro_batches: int) -> Schedule:
    """Return the schedule of a training step with so many micro-batches per data rank."""
    if parallel.resolved_schedule == "sequential":
        schedule = sequential(num_micro_batches)
    else:
        early = parallel.schedule_memory == "least"
        schedule = dualpipev(parallel.pp, num_micro_batches, early_weight_gradients=early)
    return schedule.by_block() if parallel.resolved_gather == "block" else schedule


def weights_dtype(config: Config) -> torch.dtype:
    """Return the dtype of gradients, and of parameters except for `train.weight_dtype`; matrix
    products may be narrower."""
    return torch.float64 if config.train.precision == "fp64" else torch.float32


def compute_in_fp8(model: nn.Module, device: torch.device) -> None:
    """Have the routed experts compute in FP8. Raises ConfigError for a device that cannot."""
    if not multiplies_in_fp8(device):
        raise fp8_error(
            gpu_module(device).get_device_name(device) if is_nvidia(device) else device.type
        )
    for module in model.modules():
        if isinstance(module, Experts):
            module.in_fp8 = True


def fp8_error(device: str) -> ConfigError:
    """Return the error of a configuration in FP8 for a device of this name, which cannot."""
    return ConfigError(
        f"train.fp8 = 'block' is not valid on {device}: it must be an NVIDIA GPU of compute "
        "capability 8.9 or newer, with Triton installed, or a CPU, which emulates FP8 slowly: "
        "leave train.fp8 out"
    )


def prepare_experts(
    model: RoutedModel,
    config: MoEConfig,
    data_group: dist.ProcessGroup | None = None,
    context: Context | None = None,
) -> None:
    """Set the memory mode of the MoE layers, and how their load is balanced, over the ranks of
    `data_group`, to which those of the `context` belong."""
    model.set_memory(config.memory)
    model.balance_load(config.balance_level, data_group, context)
    for router in model.routers():
        router.takes_z_loss = config.z_loss_coefficient > 0
        if config.bias_update_rate:
            router.enable_loss_free_balancing()
