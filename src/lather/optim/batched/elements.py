"""The step of elements by the kernel of their rule (`Rule.step_whole`), which changes state and
weights of many tensors together. Not every rule has a kernel, and none takes codes of 8 bits or an
update that depends on the weights.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lather.optim.batched.buckets import Bucket, in_batches
from lather.optim.batched.plan import Chunk
from lather.optim.batched.remainders import remainder_of, round_weights, wide_weights
from lather.optim.batched.runs import MemberRun

_grad = operator.attrgetter("grad")


def step_chunk_whole(chunk: Chunk) -> bool:
    """Take the step of a chunk of elements whose rows visit the device as `step_whole` does."""
    if chunk.run.info.needs_weights or _has_codes(chunk.bucket):
        return False
    weights, grads, remainders = chunk.elements()
    lengths = list(map(len, weights))
    entries = {name: x.view(-1).split(lengths) for name, x in chunk.rows_here().items()}
    return _step_elements(chunk.run, weights, grads, entries, remainders)


def step_whole(runs: Sequence[MemberRun]) -> bool:
    """Take the step of runs of elements, of the same rule, t and rates, with the rule's kernel
    (`Rule.step_whole`); return False if the rule has none for them."""
    if runs[0].info.needs_weights or _has_codes(runs[0].bucket):
        return False
    weights, grads, states = list[Tensor](), list[Any](), list[dict[str, Tensor]]()
    for run in runs:
        weights += run.params or [member.weight() for member in run.members]
        grads += map(_grad, run.params) if run.params else [x.grad() for x in run.members]
        states += run.bucket.states[run.numbers.start : run.numbers.stop]
    grads = list(map(Tensor.contiguous, grads))
    entries, remainders = dict[str, Sequence[Tensor]](), list[Tensor]()
    for name in runs[0].bucket.entries:
        entries[name] = list(map(operator.itemgetter(name), states))
    if runs[0].info.layout.keeps_remainder:
        members = chain.from_iterable(run.members for run in runs)
        remainders = [x.part(remainder_of(s)) for x, s in zip(members, states, strict=True)]
    return _step_elements(runs[0], weights, grads, entries, remainders)


def _has_codes(bucket: Bucket) -> bool:
    """Whether entries are stored as codes and their scales, which no rule's kernel takes."""
    return bucket.formats.keys() != bucket.entries.keys()


def _step_elements(
    run: MemberRun,
    weights: list[Tensor],
    grads: list[Tensor],
    entries: dict[str, Sequence[Tensor]],
    remainders: list[Tensor],
) -> bool:
    """Take the step of tensors of elements with the kernel of the run's rule. bf16 weights that are
    not rounded to the nearest take the step of fp32 weights, in batches of `bucket_bytes`."""
    rule, rounding = run.rule, run.rule.weight_rounding
    if rounding == "nearest":
        return rule.step_whole(weights, grads, entries, run.step, run.lr)
    limit = rule.bucket_bytes or run.bucket.temporary_bytes
    of_element = 2 * torch.float32.itemsize  # a weight and, unless it is fp32, a gradient
    sizes = [(i, None, of_element * w.numel() / limit) for i, w in enumerate(weights)]
    for numbers in in_batches(sizes):
        batch = slice(numbers[0], numbers[-1] + 1)
        wide = wide_weights(weights[batch], torch.float32, remainders[batch])
        wide_grads = [grad.float() for grad in grads[batch]]
        states = {name: tensors[batch] for name, tensors in entries.items()}
        if not rule.step_whole(wide, wide_grads, states, run.step, run.lr):
            return False
        round_weights(wide, weights[batch], rounding, run.step, remainders[batch])
    return True
