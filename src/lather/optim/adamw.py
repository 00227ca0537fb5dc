"""Parameters without any factor - embeddings, norms, biases - are AdamW's: torch's own fused kernel, one launch and no temporaries.

It takes what it can (`takes_fused`); the rest goes through the buckets like every matrix, with the same result to rounding.

On a CPU the kernel rounds the last elements of a tensor, which do not fill a vector register, differently from the others. What is last
depends on where a parameter is cut, and its numbers must not: those elements of all parameters go through the kernel together, filled up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lather.optim.buckets import Run
from lather.torch_private import foreach_copy_

VECTOR = 16
"""Elements in the longest vector register of a CPU."""


def takes_fused(run: Run, *, couples_decay: bool) -> bool:
    """Whether torch's kernel does what the run's options ask for: plain AdamW, with parameters, gradients and moments alike."""
    bucket, options = run.bucket, run.options
    if bucket.members[0].layout.kind != "elements" or couples_decay or run.lr == 0 or not options["correct_bias"]:
        return False
    if options.get("use_nesterov") or options.get("nesterov") or bucket.device.type not in ("cpu", "cuda"):
        return False
    dtype, members = bucket.stacks["exp_avg"].dtype, bucket.members[run.first : run.last]
    grads = [member.grad() for member in members]
    return dtype != torch.bfloat16 and bucket.dtype == dtype and all(grad.dtype == dtype and grad.is_contiguous() for grad in grads)


def fused_adamw(run: Run, decay: float) -> None:
    """One step of AdamW for all members of the run; `decay` is the share of the parameter that weight decay takes away."""
    bucket, options = run.bucket, run.options
    members, views = bucket.members[run.first : run.last], bucket.views[run.first : run.last]
    tensors = [
        (member.weight().view(-1), member.grad().view(-1), view["exp_avg"].view(-1), view["exp_avg_sq"].view(-1))
        for member, view in zip(members, views, strict=True)
    ]
    rests: list[tuple[Tensor, ...]] = []
    if bucket.device.type == "cpu":
        stops = [len(weight) - len(weight) % VECTOR for weight, *_ in tensors]
        rests = [tuple(x[stop:] for x in four) for four, stop in zip(tensors, stops, strict=True) if stop < len(four[0])]
        tensors = [tuple(x[:stop] for x in four) for four, stop in zip(tensors, stops, strict=True) if stop]  # type: ignore[misc]
    together = _filled_up(rests)
    weights, grads, exp_avgs, exp_avg_sqs = (list(one) for one in zip(*tensors, *together, strict=True))
    steps = torch.full((len(weights),), run.step - 1.0, dtype=torch.float32, device=bucket.device)  # the kernel counts on
    adamw(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        list(steps.unbind()),
        fused=True,
        amsgrad=False,
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        lr=run.lr,
        weight_decay=decay / run.lr,
        eps=options["eps"],
        maximize=options["maximize"],
    )
    for four in together:
        for kind in (0, 2, 3):
            parts = [rest[kind] for rest in rests]
            foreach_copy_(parts, list(four[kind][: sum(map(len, parts))].split([len(part) for part in parts])))


def _filled_up(rests: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """The pieces of each of four kinds one after another, with zeros up to a whole number of vectors; none if there are no pieces."""
    if not rests:
        return []
    joined = [torch.cat(pieces) for pieces in zip(*rests, strict=True)]
    return [tuple(torch.nn.functional.pad(x, (0, -len(x) % VECTOR)) for x in joined)]
