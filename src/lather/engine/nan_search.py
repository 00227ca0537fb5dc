"""The operation of a step that made a value that is not finite: the passes of the step run again,
and each operation of the dispatcher is looked at.

The first operation that makes a NaN of values without NaN is where NaNs began on a rank, and the
first that makes +inf of finite values is where a value overflowed; -inf is what masks are made of.
A rank whose first NaN came in with its inputs got it from another rank, or from a kernel that the
dispatcher does not see; buffers without values, which may hold NaN, are passed over for that
reason. Operations are named by the module whose forward pass began last, or whose output's gradient
came last in the backward pass.

Every operation is waited for: a search takes many times as long as the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lather.data.batches import Batch
from lather.engine.engine import Engine
from lather.pipeline.recorder import Recorder
from lather.pipeline.schedule import Action, Kind
from lather.storages import tensors_in
from lather.torch_private import TorchDispatchMode

UNSEEN = ("empty", "new_empty", "resize_", "set_", "detach", "alias", "_local_scalar_dense")
"""Beginnings of the names of operations whose results are not looked at."""
MOST_NAMED = 3
"""Weights and gradients that are named."""
UNREPEATED = (
    "all values are finite when the step runs again: the device, its memory or a kernel made an "
    "error, or operations that differ from run to run"
)


class _Watch(TorchDispatchMode):
    """Looks at the results of operations; `place` says what runs."""

    place = "the passes before the first layer"
    nan = inf = arrived = ""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func).removeprefix("aten.")
        inputs = [x for x in tensors_in((args, kwargs)) if _is_readable(x)]
        if self.nan or not inputs or name.startswith((*UNSEEN, "c10d")):
            return func(*args, **(kwargs or {}))
        had_nan = any(_has_nan(x) for x in inputs)
        had_inf = had_nan or any(_has_inf(x) for x in inputs)
        results = func(*args, **(kwargs or {}))
        outputs = [x for x in tensors_in(results) if _is_readable(x)]
        if any(_has_nan(x) for x in outputs):
            text = f"{name} in {self.place}"
            if not had_nan:
                self.nan = text
            elif not _storages(inputs) & _storages(outputs):  # no view of a buffer
                self.arrived = self.arrived or text
        elif not had_inf and not self.inf and any(_has_inf(x) for x in outputs):
            self.inf = f"{name} in {self.place}"
        return results


def _is_readable(x: Any) -> bool:
    """Return whether `x` is a plain tensor of floating point numbers that was not freed."""
    if type(x) not in (Tensor, nn.Parameter) or not x.is_floating_point() or not x.numel():
        return False
    return x.untyped_storage().nbytes() > 0


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors}


def _has_nan(x: Tensor) -> bool:
    return bool(torch.isnan(x.detach()).any())


def _has_inf(x: Tensor) -> bool:
    return bool((x.detach() == torch.inf).any())


class _WeightActions(Recorder):
    """Tells the watch when deferred weight gradients run."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    @contextlib.contextmanager
    def action(self, action: Action) -> Iterator[None]:
        if action.kind is Kind.BACKWARD_WEIGHT:
            stage, micro_batch = action.stage, action.micro_batch
            self._watch.place = f"weight gradients of stage {stage}, micro-batch {micro_batch}"
        yield


@contextlib.contextmanager
def _naming_places(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """Keep `watch.place` up to date while the passes of `model` run."""
    seen: dict[Any, None] = {}  # outputs of nodes of the graph whose gradients have a hook

    def set_place(place: str) -> None:
        watch.place = place

    def before(name: str) -> Callable[..., None]:
        return lambda module, args: set_place(f"the forward pass of {name}")

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            for x in tensors_in(output):
                key = x.grad_fn, x.output_nr
                if x.grad_fn is not None and key not in seen:
                    seen[key] = None  # inner modules come first
                    x.register_hook(lambda _: set_place(f"the backward pass of {name}"))

        return hook

    handles: list[Any] = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(before(name)))
            handles.append(module.register_forward_hook(after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class NanOrigin:
    """The values of a rank that are not finite."""

    text: str
    """Empty if there are none."""
    began: bool
    """Whether they began on this rank."""


def search(engine: Engine, batch: Batch) -> NanOrigin:
    """Run the passes of a step again; return where its values that are not finite began. All ranks
    call this together, after a step that changed nothing; it changes nothing either. `batch`: this
    rank's share of the step.
    """
    bad = [
        entry.info.name
        for entry in engine.parameters
        if not entry.info.is_empty and not torch.isfinite(entry.parameter.detach()).all()
    ]
    watch = _Watch()  # type: ignore[no-untyped-call]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_naming_places(engine.part, watch))
        stack.enter_context(engine.recorded_by(_WeightActions(watch)))
        stack.enter_context(watch)
        engine.launch_gradients(batch, with_logits=True)  # which takes no CUDA graph
    gradients = [
        entry.info.name
        for entry in engine.parameters
        if (grad := entry.parameter.grad) is not None and not torch.isfinite(grad).all()
    ]
    engine.parameters.clear_gradients()
    if bad:  # the other ranks have needed this one's passes
        return NanOrigin(f"before the step {_listed(bad)} not finite", began=True)
    found: list[str] = []
    if watch.inf and (watch.nan or gradients):
        found.append(f"a value became infinite at {watch.inf}")
    if watch.nan:
        found.append(f"NaN began at {watch.nan}")
    elif watch.arrived and gradients:
        found.append(f"NaN arrived at {watch.arrived}, from another rank or an unseen kernel")
    if gradients:
        found.append(f"after it the gradients of {_listed(gradients)} not finite")
    return NanOrigin("; ".join(found), began=bool(watch.nan or (watch.inf and gradients)))


def describe(findings: Sequence[NanOrigin]) -> list[str]:
    """Return a sentence for each rank on which values that are not finite began; `findings`: those
    of all ranks. If there is no such rank, one for each that has such values."""
    texts = {rank: f"rank {rank}: {each.text}" for rank, each in enumerate(findings) if each.text}
    began = [text for rank, text in texts.items() if findings[rank].began]
    return began or [*texts.values()] or [UNREPEATED]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    text = ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{text} {'is' if len(names) == 1 else 'are'}"
