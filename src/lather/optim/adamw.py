"""Parameters without any factor - embeddings, norms, biases - are AdamW's: torch's own fused kernel, one launch and no temporaries.

It takes what it can (`takes_fused`); the rest goes through the buckets like every matrix, with the same result to rounding.
"""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw

from lather.optim.buckets import Run, grad_of


def takes_fused(run: Run, *, couples_decay: bool) -> bool:
    """Whether torch's kernel does what the run's options ask for: plain AdamW, with parameters, gradients and moments alike."""
    bucket, options = run.bucket, run.options
    if bucket.layouts[0].kind != "elements" or couples_decay or run.lr == 0 or not options["correct_bias"]:
        return False
    if options.get("use_nesterov") or options.get("nesterov") or bucket.params[0].device.type not in ("cpu", "cuda"):
        return False
    dtype = bucket.stacks["exp_avg"].dtype
    params = bucket.params[run.first : run.last]
    return dtype != torch.bfloat16 and all(p.dtype == dtype == grad_of(p).dtype and grad_of(p).is_contiguous() for p in params)


def fused_adamw(run: Run, decay: float) -> None:
    """One step of AdamW for all members of the run; `decay` is the share of the parameter that weight decay takes away."""
    bucket, options = run.bucket, run.options
    params, views = bucket.params[run.first : run.last], bucket.views[run.first : run.last]
    steps = torch.full((len(params),), run.step - 1.0, dtype=torch.float32, device=params[0].device)  # the kernel counts on
    adamw(
        [p.detach() for p in params],
        [grad_of(p) for p in params],
        [view["exp_avg"] for view in views],
        [view["exp_avg_sq"] for view in views],
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
