"""The cases that `make gpu` measures, counted: what the time model says of them can be held against
what a GPU took.

    block       forward and backward of the block of `benchmarks.gpu.block`
    step        training steps of benchmarks/gpu/moe-1.7b.toml, by each of three optimizers
    refresh     the refresh of the factors of `benchmarks.gpu.refresh`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.gpu.block import (
    BlockSizes,
    block_config,
    block_model,
    forward_and_backward,
    prepare,
)
from benchmarks.gpu.parts import ROOT
from benchmarks.gpu.refresh import NUM_LAYERS, Factors, refresh_batched_by_lather
from benchmarks.launches.cases import LaunchCase, flops_of_step, rule_options, training_steps
from benchmarks.launches.counter import Counter
from lather.config.optim import optim_config
from lather.config.toml_file import load_config
from lather.models.families import build_model
from lather.models.model_flops import flops_per_token
from lather.models.token_positions import SequenceLayout

STEP_MODEL = "moe-1.7b"
STEP_RULES = ("adamw", "muon", "soap_muon")


def gpu_block_case(contestant: str) -> LaunchCase:
    """Make the case of the block that is measured, as a contestant computes it."""
    sizes = BlockSizes()
    tokens = sizes.sequences * sizes.length

    def rows(counter: Counter) -> Iterator[str]:
        model = block_model(sizes, counter.device)
        prepare(model, contestant)
        block: Any = model.layers[0]
        layout = SequenceLayout(sizes.sequences, sizes.length, counter.device)
        shape = (sizes.sequences, sizes.length, sizes.hidden)
        x_BSD, cotangent_BSD = (torch.empty(shape, device=counter.device) for _ in range(2))
        for _ in range(2):  # the second pass finds masks and rotary tables made
            counter.restart()
            forward_and_backward(block, x_BSD.requires_grad_(), layout, cotangent_BSD)
        yield "forward and backward"

    whole = build_model(block_config(sizes), None, torch.device("meta"))
    useful = tokens * flops_per_token(whole.layers, block_config(sizes), sizes.length)
    described = {"part": "gpu block", "contestant": contestant, **asdict(sizes)}
    return LaunchCase(f"the block of make gpu, {contestant}", described, rows, useful)


def gpu_step_case(rule: str) -> LaunchCase:
    """Make the case of the training steps that are measured, with an optimizer."""
    config = load_config(ROOT / f"benchmarks/gpu/{STEP_MODEL}.toml")
    optim = optim_config(rule, **rule_options(rule))
    config = replace(config, optim=optim).resolved()
    described = {
        "part": "gpu step",
        "model": STEP_MODEL,
        "optimizer": rule,
        "frequency": getattr(optim_config(rule), "precondition_frequency", None),
        "hidden_size": config.model.hidden_size,
        "num_hidden_layers": config.model.num_hidden_layers,
        "batch_size": config.train.batch_size,
        "micro_batch_size": config.train.micro_batch_size,
        "sequence_length": config.train.sequence_length,
    }
    return LaunchCase(
        f"a training step, {STEP_MODEL}, {rule}",
        described,
        lambda counter: training_steps(counter, config),
        flops_of_step(config),
    )


def refresh_case(hidden: int, mlp: int) -> LaunchCase:
    """Make the case of the refresh of the factors of twelve layers."""
    num_factors = {hidden: 6 * NUM_LAYERS, mlp: 2 * NUM_LAYERS}

    def rows(counter: Counter) -> Iterator[str]:
        shapes = [(b, n, n) for n, b in num_factors.items()]
        factors = [
            Factors(*(torch.empty(shape, device=counter.device) for _ in range(2)))
            for shape in shapes
        ]
        counter.restart()
        refresh_batched_by_lather(factors)
        yield f"{hidden} / {mlp}"

    described = {"part": "refresh", "hidden": hidden, "mlp": mlp}
    return LaunchCase(f"a refresh of {sum(num_factors.values())} factors", described, rows)
