"""Trains a mixture of experts for 50 steps, or as many as there is time for, and measures tokens
per second, the share of the device's peak (MFU) and the most memory.

    model flops per token = 6 * (parameters that multiply a token) + 3 * layers * heads * S * (query
    width + value width)

A multiplication and an addition are two flops; backward costs twice the forward. The parameters
that multiply a token are the matrices without the embedding and with the head; of the routed
experts K of E count. Attention is causal: half of S x S. Recomputation, the optimizer and the
router's bookkeeping do not count, so that the share is of useful work. MFU = flops per token *
tokens per second / peak.

Tokens are drawn by Zipf's law, so that there is something to learn, and no file or network is
needed. Weights are drawn on the device: the CPU would need ten seconds. The rate leaves out the
first steps, which compile and make the first bases; it includes refreshes.

Letters: B sequences, S tokens of each, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.check import CheckError
from benchmarks.gpu.clock import measure_rates, peak_flops
from benchmarks.gpu.parts import ROOT
from benchmarks.gpu.work import Settings
from benchmarks.report import Row
from lather.config.config import Config
from lather.config.optim import optim_config
from lather.config.toml_file import load_config
from lather.data.batches import Batch
from lather.device import gpu_module, is_gpu
from lather.engine.engine import Engine
from lather.engine.optimizer import build_optimizer
from lather.engine.settings import schedule_for, weights_dtype
from lather.engine.step import TrainStep
from lather.engine.step_reading import StepResult
from lather.models.families import build_model
from lather.models.model_flops import flops_per_token
from lather.parallel.mesh import Mesh
from lather.pipeline.model_part import PartLayers, empty_part
from lather.pipeline.tape import Frees

STEPS, WARM_UP = 50, 10
"""`WARM_UP` is an interval between refreshes, and is left out of the rate, which counts whole
intervals."""
LEARNING_RATE = {"adamw": 5e-4, "muon": 2e-3, "soap_muon": 2e-3}


def rows(settings: Settings, contestant: str) -> Iterator[Row]:
    """Train with the optimizer `contestant`, which "-graph" follows if steps are replayed as a CUDA
    graph; yields a row. Raises CheckError if a loss is not finite or the last is not below the
    first."""
    optimizer, _, graph = contestant.partition("-")
    config = load_config(
        ROOT / "benchmarks/gpu" / ("small.toml" if settings.small else "moe-1.7b.toml")
    )
    config = replace(
        config,
        optim=optim_config(optimizer, lr=LEARNING_RATE[optimizer]),
        train=replace(config.train, cuda_graph=bool(graph)),
    ).resolved()
    device = settings.device
    peak, source = peak_flops(device, measure_rates(device, small=settings.small))
    results, seconds, memory = _train(config, settings)
    losses = [result.loss for result in results]
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise CheckError(
            f"{contestant}: the losses {losses[0]:.3f} to {losses[-1]:.3f} are not those of a "
            "model that learns"
        )
    counted = seconds[WARM_UP:]
    tokens_per_second = (
        config.train.batch_size * config.train.sequence_length * len(counted) / sum(counted)
    )
    model = build_model(config.model, None, torch.device("meta"))
    flops = flops_per_token(model, config.model, config.train.sequence_length)
    yield {
        "benchmark": "training",
        "config": {
            "optimizer": optimizer,
            "cuda_graph": config.train.cuda_graph,
            "device": device.type,
            "steps": len(losses),
            "model": asdict(config.model),
            **_loop(config),
        },
        "baseline": "peak",
        "check": {"first_loss": losses[0], "last_loss": losses[-1]},
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_second": tokens_per_second,
        "flops_per_token": flops,
        "mfu": flops * tokens_per_second / peak,
        "peak_flops": peak,
        "peak_source": source,
        "first_step_seconds": seconds[0],
        "step_seconds": sum(counted) / len(counted),
        "optimizer_seconds": sum(result.optimizer_seconds for result in results[WARM_UP:])
        / len(counted),
        "peak_bytes": memory,
        "losses": losses,
        "seconds": seconds,
    }


def _loop(config: Config) -> dict[str, Any]:
    return {
        key: getattr(config.train, key)
        for key in ("batch_size", "micro_batch_size", "sequence_length", "precision")
    }


def _train(config: Config, settings: Settings) -> tuple[list[StepResult], list[float], int | None]:
    """Train; returns the result and the seconds of each step, and the most bytes of the device's
    memory.

    It takes fewer steps than `STEPS` if time runs out, but more than `WARM_UP`.
    """
    started, device = time.monotonic(), settings.device
    engine = _engine(config, device)
    step = TrainStep(
        engine, build_optimizer(config.optim, engine.parameters), config.train.max_grad_norm
    )
    generator = torch.Generator().manual_seed(0)
    odds_V = 1 / torch.arange(1, config.model.vocab_size + 1)
    shape = (config.train.batch_size, config.train.sequence_length + 1)
    if is_gpu(device):
        gpu_module(device).reset_peak_memory_stats(device)
    results: list[StepResult] = []
    seconds = []
    for _ in range(STEPS):
        tokens_BS = torch.multinomial(
            odds_V, math.prod(shape), replacement=True, generator=generator
        ).view(shape)
        start = time.perf_counter()
        results.append(step(Batch.of_tokens(tokens_BS), config.optim.peak_lr))
        if is_gpu(device):
            gpu_module(device).synchronize(device)
        seconds.append(time.perf_counter() - start)
        print(f"step {len(seconds)}: loss {results[-1].loss:.3f}, {seconds[-1]:.2f} s", flush=True)
        if len(seconds) > WARM_UP and time.monotonic() - started > settings.seconds:
            break
    memory = gpu_module(device).max_memory_allocated(device) if is_gpu(device) else None
    return results, seconds, memory


@torch.no_grad()
def _engine(config: Config, device: torch.device) -> Engine:
    """Build the engine of a single rank, with other random weights than `build_engine` draws."""
    whole = build_model(config.model, None, torch.device("meta"))
    share = PartLayers((range(len(whole.layers)),))
    part = empty_part(whole, share, device, weights_dtype(config))
    generator = torch.Generator(device).manual_seed(config.seed)
    for parameter in part.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, config.model.initializer_range, generator=generator)
        else:  # a norm's
            parameter.fill_(1)
    schedule = schedule_for(config.parallel, config.num_micro_batches(1))
    return Engine(part, Mesh.single(device), schedule, config.train, config.resolved_moe(), Frees())
