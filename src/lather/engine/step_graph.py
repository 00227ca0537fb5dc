"""The forward and backward passes of a step as a CUDA graph: captured once, and then replayed, so
that the host launches one graph in place of some hundred kernels per layer.

Source: CUDA graphs (https://docs.nvidia.com/cuda/cuda-programming-guide, "CUDA Graphs"), by
`torch.cuda.graph`.

A graph repeats its kernels with the same addresses, and nothing of the Python around them. So each
step copies its tokens, labels and divisors to where the graph reads them, and takes its gradients
from where the graph writes them. `lather.config.ranks` says which runs can do that: those of a
single rank, in whose passes the host waits for nothing. Steps with documents or padding, and passes
that measure logits, run without the graph, which is released for them, because what the passes hold
at their peak stays allocated as long as there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lather.errors import UserError
from lather.pipeline.chunk import MicroBatch
from lather.pipeline.executor import StepOutput

Passes = Callable[[Sequence[MicroBatch]], StepOutput]
"""Runs the passes of these micro-batches, which sets the gradients of parameters."""

WARM_UP = 2
"""Steps before the first capture: they compile kernels, and fill caches that a graph may not
fill."""


@dataclass(frozen=True)
class Captured:
    """A captured graph with the tensors that it reads and writes."""

    replay: Callable[[], None]
    micro_batches: list[MicroBatch]
    output: StepOutput
    gradients: list[tuple[nn.Parameter, Tensor]]


class StepGraph:
    """Runs the passes of steps, from the third on as a graph."""

    def __init__(
        self,
        run: Passes,
        parameters: Iterable[nn.Parameter],
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        """`parameters`: those whose gradients the passes set; `capture`: captures the kernels that
        a function launches, and returns the function that replays them; None: as a CUDA graph."""
        self._run, self._parameters = run, list(parameters)
        self._capture = capture or cuda_graph
        self._num_steps = 0
        self._captured: Captured | None = None

    def __call__(self, micro_batches: Sequence[MicroBatch], *, replays: bool = True) -> StepOutput:
        """Run the passes; the gradients are None before, and those of these micro-batches
        afterwards. Without `replays`, and if these micro-batches differ from the captured ones in
        more than tokens, labels and divisors, the passes run without a graph."""
        assert all(p.grad is None for p in self._parameters), "gradients were not cleared"
        self._num_steps += 1
        captured = self._captured
        if not replays or (captured and not _can_take(captured.micro_batches, micro_batches)):
            self._captured = captured = None
            return self._run(micro_batches)
        if self._num_steps <= WARM_UP:
            return self._run(micro_batches)
        captured = self._captured = captured or self._capture_passes(micro_batches)
        for static, given in zip(captured.micro_batches, micro_batches, strict=True):
            _copy(static, given)
        captured.replay()
        for parameter, grad in captured.gradients:
            parameter.grad = grad
        return captured.output

    def _capture_passes(self, micro_batches: Sequence[MicroBatch]) -> Captured:
        own, outputs = [_own(each) for each in micro_batches], list[StepOutput]()
        replay = self._capture(lambda: outputs.append(self._run(own)))
        gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        return Captured(replay, own, outputs[0], gradients)


def cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Capture the kernels that `work` launches, without running them; return the function that
    launches them all. Raises UserError if the host waits for the device in `work`."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        raise UserError(
            "train.cuda_graph: the forward and backward passes cannot be captured as a CUDA graph, "
            f"so leave it out ({str(error).splitlines()[0]})"
        ) from error
    return graph.replay


def _own(given: MicroBatch) -> MicroBatch:
    """Return a copy with tensors of its own; a divisor that is a number becomes one, too."""
    assert not given.depths, "steps with multi-token prediction are not captured"
    tokens, x = given.tokens_BS, given.normalizer
    divisor = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
    return replace(
        given,
        tokens_BS=tokens.clone(),
        labels_BS=given.labels_BS.clone(),
        normalizer=divisor.to(tokens.device, copy=True),
    )


def _weights(each: MicroBatch) -> tuple[float | Tensor, ...]:
    return each.balance_weight, each.z_weight, each.loss_weight


def _can_take(statics: Sequence[MicroBatch], given: Sequence[MicroBatch]) -> bool:
    """Return whether a graph that was captured with some micro-batches can run others."""
    return len(statics) == len(given) and all(
        static.layout is each.layout
        and static.tokens_BS.shape == each.tokens_BS.shape
        and _weights(static) == _weights(each)
        for static, each in zip(statics, given, strict=True)
    )


def _copy(static: MicroBatch, given: MicroBatch) -> None:
    static.tokens_BS.copy_(given.tokens_BS)
    static.labels_BS.copy_(given.labels_BS)
    divisor, x = static.normalizer, given.normalizer
    assert isinstance(divisor, Tensor)
    if isinstance(x, Tensor):
        divisor.copy_(x)
    else:
        divisor.fill_(x)
