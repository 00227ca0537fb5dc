"""Lets torchtitan run on a machine without an accelerator, with gloo; on a machine with one it does
nothing. Import it before torchtitan."""

import os
from types import SimpleNamespace
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule

if not torch.accelerator.is_available():
    named = {
        "get_device_name": lambda _: "CPU",
        "get_device_properties": lambda _: SimpleNamespace(total_memory=2**30),
    }
    calls = dict.fromkeys(
        ("set_device", "current_device", "reset_peak_memory_stats", "empty_cache", "synchronize"),
        lambda *_: 0,
    )
    cpu = SimpleNamespace(memory_stats=lambda _: {}, **named, **calls)
    with mock.patch.multiple(
        "torch._utils", _get_available_device_type=lambda: "cpu", _get_device_module=lambda _: cpu
    ):
        import torchtitan.tools.utils  # noqa: F401

    divide = FSDPModule.set_gradient_divide_factor

    def divide_after_sum(module, factor):
        """Sum and then divide, because gloo cannot multiply in a reduction."""
        module.set_force_sum_reduction_for_comms(True)
        divide(module, factor)

    FSDPModule.set_gradient_divide_factor = divide_after_sum


def join_or_be_alone():
    """Join torchrun's ranks; without torchrun, make this process the only rank."""
    for name, alone in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, alone)
