"""Steps of a tiny model on one rank, and what the optimizer is given in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.config.config import MoEConfig
from lather.config.loop import LoopConfig
from lather.data.batches import Batch
from lather.engine.engine import Engine
from lather.engine.step import TrainStep
from lather.engine.step_reading import StepResult
from lather.models.decoder import Decoder
from lather.optim import AdamW, MatrixOptimizer
from lather.parallel.mesh import Mesh
from lather.pipeline.schedule import sequential
from lather.pipeline.tape import Frees
from models.tiny import whole_part

CPU = torch.device("cpu")


def train_step(
    model: Decoder, optimizer: MatrixOptimizer, moe: MoEConfig | None = None, **loop: Any
) -> TrainStep:
    """Make steps of four sequences of 16 tokens; without `moe` there is no auxiliary loss."""
    moe = moe or MoEConfig(balance_coefficient=0.0)
    options = {"batch_size": 4, "micro_batch_size": 4, "sequence_length": 16, "max_grad_norm": 0.0}
    config = LoopConfig(**(options | loop))
    schedule = sequential(config.batch_size // config.micro_batch_size)
    engine = Engine(whole_part(model), Mesh.single(CPU), schedule, config, moe, Frees())
    return TrainStep(engine, optimizer, config.max_grad_norm)


def gradients_of_step(
    model: Decoder,
    tokens_BS: Tensor,
    moe: MoEConfig | None = None,
    *,
    end: int | None = None,
    **loop: Any,
) -> tuple[dict[str, Tensor], StepResult]:
    """Return the clipped gradients of which the optimizer takes its step, and the result. Token
    `end` ends a document, whose end attention does not cross."""
    optimizer = AdamW(model.parameters(), lr=0.0)
    gradients: dict[str, Tensor] = {}
    optimizer.register_step_post_hook(
        lambda *_: gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})
    )
    batch = Batch.of_tokens(tokens_BS)
    if end is not None:
        batch = replace(batch, begins_BS=F.pad(batch.inputs_BS[:, :-1] == end, (1, 0)))
    step = train_step(model, optimizer, moe, sequence_length=tokens_BS.shape[1] - 1, **loop)
    return gradients, step(batch, 0.0)


def state_bits(model: Decoder, optimizer: MatrixOptimizer) -> list[bytes]:
    """Return the bits of parameters, buffers and optimizer state."""
    states = [optimizer.state.get(p, {}) for p in model.parameters()]
    values = [torch.as_tensor(value) for state in states for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *values]
    return [x.detach().flatten().view(torch.uint8).numpy().tobytes() for x in tensors]
