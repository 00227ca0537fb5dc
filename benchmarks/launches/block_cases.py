"""The cases of an MoE block, forward and backward, as the engine runs it in one process, or on one
rank of several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.launches.cases import TOKENS, LaunchCase, model_config, rows_of_expert
from benchmarks.launches.counter import Counter
from lather.config.config import Config, MoEConfig, ParallelConfig
from lather.config.loop import LoopConfig
from lather.config.optim import optim_config
from lather.engine.settings import compute_in_fp8
from lather.memory.dry_rank import Load
from lather.models.families import ModelConfig, build_model
from lather.models.model_flops import flops_per_token
from lather.models.moe import LOCAL_EXCHANGE, MoE
from lather.models.saving.rounded_weights import (
    RoundedWeights,
    narrow_product_weights,
    set_rounded_weights,
)
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from lather.models.token_positions import SequenceLayout
from lather.parallel.context_ranks import ContextRanks
from lather.parallel.expert_exchange import ExpertExchange
from lather.pipeline.chunk import ChunkTape, MicroBatch
from lather.pipeline.model_part import ModelPart, PartLayers, Stage, empty_part
from lather.pipeline.segments import Segments
from lather.torch_private import start_fake_process_group

BLOCK_PASSES = ("forward and backward", "the same of a later micro-batch")
"""Passes of a block in a step; the gradients of the later one are added to those of the one before,
and it finds the weights rounded already."""
SEQUENCES = 2
"""Sequences of a block's tokens, if no context ranks divide one."""


def block_case(
    model: str,
    tokens: int = TOKENS,
    precision: str = "bf16",
    context_ranks: int = 1,
    expert_ranks: int = 1,
    weight_dtype: str = "float32",
    fp8: bool = False,
) -> LaunchCase:
    """Make the case of an MoE block, forward and backward, as the engine runs it in one process, or
    on one of the ranks that each have so many tokens of a sequence, or that share the experts with
    an even load. Weights in bfloat16 are those of `train.weight_dtype`, and those that data ranks
    gather from each other; `fp8` is `train.fp8 = "block"`."""
    config = model_config(model, num_hidden_layers=2)
    sequences = 1 if context_ranks > 1 else SEQUENCES
    length = tokens * context_ranks // sequences

    def rows(counter: Counter) -> Iterator[str]:
        counter.rows_of_expert = rows_of_expert(tokens * expert_ranks, config)
        counter.rows_and_pairs = rows_and_pairs(tokens, config, expert_ranks)
        part = _part(config, counter.device, expert_ranks, weight_dtype, fp8=fp8)
        block = moe_block(map(part.block, range(len(part.layers))))
        queue = WeightGradients()
        defer_weight_gradients(part, queue)
        kept = RoundedWeights()
        set_rounded_weights(part, kept)
        stage = Stage(0, (block,))
        context = ContextRanks(0, context_ranks) if context_ranks > 1 else None
        layout = SequenceLayout(sequences, length, counter.device, context=context)
        shape = (sequences, tokens // sequences)
        tokens_BS = torch.zeros(shape, dtype=torch.long, device=counter.device)
        batch = MicroBatch(tokens_BS, tokens_BS, layout)
        with _ranks(max(context_ranks, expert_ranks), counter.device):
            experts = config.num_routed_experts
            segments = Segments(
                ExpertExchange(None, experts) if expert_ranks > 1 else LOCAL_EXCHANGE,
                weight_gradients=queue,
                autocast=torch.bfloat16 if precision == "bf16" else None,
                rounded_weights=kept,
            )
            # the first step makes masks and rotary tables
            for names in (("",), BLOCK_PASSES):
                for p in block.parameters():
                    p.grad = None
                with kept.caching():  # as a step does: its micro-batches share rounded weights
                    for name in names:
                        x_BSD, tape = (
                            torch.empty(*shape, part.hidden_size, device=counter.device),
                            ChunkTape(batch),
                        )
                        counter.restart()
                        y_BSD = _finish(segments.forward(stage, x_BSD, tape, []))
                        _finish(segments.backward(tape, torch.empty_like(y_BSD)))
                        if name:
                            yield name

    name = f"an MoE block of {model}"
    described: dict[str, Any] = {"part": "block", "model": model}
    for differs, text, values in (
        (context_ranks > 1, f"a context rank of {context_ranks}", {"context_ranks": context_ranks}),
        (expert_ranks > 1, f"an expert rank of {expert_ranks}", {"expert_ranks": expert_ranks}),
        (weight_dtype != "float32", "weights in bf16", {"weight_dtype": weight_dtype}),
        (fp8, "experts in FP8", {"fp8": "block"}),
    ):
        if differs:
            name, described = f"{name}, {text}", described | values
    described |= {"tokens": tokens, "sequences": sequences, "precision": precision}
    whole = build_model(config, None, torch.device("meta"))
    useful = tokens * flops_per_token(moe_block(whole.layers), config, length, 1)
    return LaunchCase(name, described, rows, useful)


def rows_and_pairs(tokens: int, model: ModelConfig, expert_ranks: int) -> tuple[int, int]:
    """Return how many tokens of a rank have experts on another, and how many pairs with them, with
    an even load."""
    config = Config(
        model=model,
        train=LoopConfig(),
        moe=MoEConfig(),
        optim=optim_config("adamw"),
        parallel=ParallelConfig(ep=expert_ranks),
    )
    load = Load(config, tokens, imbalance=1.0)
    return load.rows, load.pairs


def moe_block(blocks: Iterable[nn.Module]) -> Any:
    """Return the first block with experts."""
    return next(block for block in blocks if isinstance(getattr(block, "mlp", None), MoE))


@contextmanager
def _ranks(number: int, device: torch.device) -> Iterator[None]:
    """Pretend that there are so many ranks, of which this one is the first."""
    if number == 1:
        yield
        return
    start_fake_process_group(0, number, device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _part(
    config: ModelConfig, device: torch.device, expert_ranks: int, weight_dtype: str, *, fp8: bool
) -> ModelPart:
    whole = build_model(config, None, torch.device("meta"))
    layers = PartLayers((range(len(whole.layers)),), expert_ranks=expert_ranks)
    part = empty_part(whole, layers, device)
    if weight_dtype == "bfloat16":
        narrow_product_weights(part, torch.bfloat16)
    if fp8:
        compute_in_fp8(part, device)
    return part


def _finish(steps: Any) -> Any:
    """Run a generator, which stops wherever something travels, to its end; returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
