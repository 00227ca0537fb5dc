"""`MatrixOptimizer`, the torch Optimizer under every rule of the family: it holds state, checks input and runs the phases of a step.

    collect   check every gradient, and where a refresh is due, before anything is changed; create missing state; count the step
    update    per parameter, the rule's own update (lather.optim.soap)
    refresh   per parameter, new eigenbases where they are due

A rule sees a parameter only as a batch (B, n_0, n_1, ...) with a `MatrixState`; the layouts are `lather.optim.layout`'s business.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim.optimizer import ParamsT

from lather.optim.eigenbasis import RefreshCounts
from lather.optim.kronecker import Factors
from lather.optim.layout import Layout, layout_of

logger = logging.getLogger(__name__)

GIB = 2**30

FP32_PRECISION = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}
"""torch's three levels, for cuBLAS and for oneDNN."""

OTHER_GROUP_KEYS = {"params", "param_names", "initial_lr", "name"}
"""What a parameter group may hold besides options: torch's own keys, and a label."""


@dataclass
class MatrixState:
    """One parameter's state seen as a batch; all tensors are views into `optimizer.state[p]`."""

    step: int
    """t: 1 at the first gradient."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    factors: Factors
    bases: Factors


@dataclass
class _Work:
    """What one step does to one parameter."""

    param: Tensor
    grad: Tensor
    group: dict[str, Any]
    layout: Layout
    state: MatrixState
    refresh: bool
    """The bases are refreshed at the end of this step."""


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """fp32 matmul precision ("highest" | "high" | "medium", as torch names them) inside the block, the caller's own after it.

    Set per backend: reading `torch.get_float32_matmul_precision` raises once a caller has set it that way.
    """
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend, value in zip(backends, FP32_PRECISION[precision], strict=True):
            backend.fp32_precision = value
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


class MatrixOptimizer(torch.optim.Optimizer):
    """Base of the family. A rule implements `_check_options`, `_update`, `_refresh_due` and `_refresh`.

    State per parameter, flat keys: `step`, `exp_avg`, `exp_avg_sq`, and `factor_i`, `basis_i` for each inner dim i with a factor. All but
    `step` are in the group's `state_dtype`, whatever the parameter's dtype.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._counts: dict[tuple[str, torch.device], Tensor | int] = {}
        super().__init__(params, defaults)

    # --- what a rule provides -------------------------------------------------------------------------------------------------------

    def _check_options(self, options: dict[str, Any]) -> None:
        """Raise on bad values; may set dependent ones."""
        raise NotImplementedError

    def _update(self, w: Tensor, g: Tensor, state: MatrixState, options: Mapping[str, Any]) -> None:
        """Change w (B, ...) and the state in place, given the gradient g (B, ...), which stays as it is."""
        raise NotImplementedError

    def _refresh_due(self, step: int, options: Mapping[str, Any]) -> bool:
        """Whether the bases are refreshed at the end of this step."""
        raise NotImplementedError

    def _refresh(self, g: Tensor, state: MatrixState, options: Mapping[str, Any]) -> RefreshCounts:
        """Refresh the bases and carry the moments over, in place."""
        raise NotImplementedError

    # --- torch.optim.Optimizer ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; a bad option, layout or parameter raises before the group is added."""
        known = set(self.defaults) | OTHER_GROUP_KEYS
        if unknown := sorted(set(param_group) - known):
            raise ValueError(f"unknown option {unknown[0]!r} in a parameter group; known options: {', '.join(sorted(known))}")
        options = {**self.defaults, **param_group}
        self._check_options(options)
        super().add_param_group({**param_group, **{key: options[key] for key in self.defaults}})
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        for index, p in enumerate(group["params"]):
            name = _param_name(group, index)
            if p.is_complex():
                raise TypeError(f"{name} is complex ({p.dtype}); the SOAP family takes real parameters: give it to torch.optim.Adam")
            if group["matrix_layout"] != "tensor" and p.dim() == 1:
                raise ValueError(
                    f"{name} has shape {tuple(p.shape)}, but matrix_layout={group['matrix_layout']!r} needs a matrix: "
                    "put it in a group with matrix_layout='tensor'"
                )
            size = _state_bytes(layout_of(tuple(p.shape), group), group)
            if group["max_state_bytes"] is not None and size > group["max_state_bytes"]:
                raise ValueError(
                    f"state of {name} with shape {tuple(p.shape)} would take {size / GIB:.3f} GiB, more than max_state_bytes "
                    f"({group['max_state_bytes'] / GIB:.3f} GiB): lower max_precond_dim for one-sided preconditioning, "
                    "use matrix_layout='per_expert' for stacked experts, or raise the limit"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss.

        Raises TypeError for sparse or complex gradients and, under `nonfinite="raise"`, ValueError for non-finite ones; in both cases
        nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with record_function("lather.optim.collect"):
            work = self._collect()
        with ExitStack() as stack:
            for device_type in {item.param.device.type for item in work}:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            with record_function("lather.optim.update"):
                for precision, items in _by_option(work, "fp32_matmul_prec"):
                    with matmul_precision(precision):
                        for item in items:
                            self._update_param(item)
            with record_function("lather.optim.refresh"):
                due = [item for item in work if item.refresh]
                for precision, items in _by_option(due, "qr_fp32_matmul_prec"):
                    with matmul_precision(precision):
                        for item in items:
                            self._refresh_param(item)
        return loss

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state of every parameter that has none, as it is before the first gradient (for loading checkpoints)."""
        for group in self.param_groups:
            for p in group["params"]:
                self._init_param_state(p, group)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load bit for bit: torch's own casts state to the parameter's dtype, which would ruin fp32 factors of bf16 parameters.

        The exact values go in between the caller's pre-hooks and post-hooks, on top of what torch has loaded.
        """
        final: dict[str, Any] = {}

        def note(_: torch.optim.Optimizer, after_hooks: dict[str, Any]) -> None:
            final.update(after_hooks)

        def load_exactly(_: torch.optim.Optimizer) -> None:
            saved_ids = chain.from_iterable(group["params"] for group in final["param_groups"])
            params = chain.from_iterable(group["params"] for group in self.param_groups)
            for saved_id, p in zip(saved_ids, params, strict=True):
                for key, value in final["state"].get(saved_id, {}).items():
                    if isinstance(value, Tensor):
                        self.state[p][key] = value.detach().to("cpu" if key == "step" else p.device, copy=True)
                    else:
                        self.state[p][key] = deepcopy(value)

        handles = [self.register_load_state_dict_pre_hook(note), self.register_load_state_dict_post_hook(load_exactly, prepend=True)]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_counts", {})
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_counts": self._counts}

    @property
    def counters(self) -> dict[str, int]:
        """Since construction: matrices refreshed, skipped by the criterion or for want of tokens, failed; gradients skipped."""
        names = ("refreshes_done", "refreshes_skipped", "refreshes_failed", "nonfinite_skipped")
        return {name: sum(int(value) for (key, _), value in self._counts.items() if key == name) for name in names}

    # --- the phases -----------------------------------------------------------------------------------------------------------------

    def _collect(self) -> list[_Work]:
        candidates = [
            (p, group, _param_name(group, index))
            for group in self.param_groups
            for index, p in enumerate(group["params"])
            if p.grad is not None
        ]
        for p, _, name in candidates:
            if p.grad.is_sparse or p.grad.is_complex():
                kind = "sparse" if p.grad.is_sparse else "complex"
                raise TypeError(f"gradient of {name} is {kind}; the SOAP family takes dense real gradients: give it to another optimizer")
        finite = self._check_finite(candidates)
        used = [(p, group) for (p, group, _), is_finite in zip(candidates, finite, strict=True) if is_finite]
        refresh = [self._refresh_due(int(self.state.get(p, {}).get("step", 0)) + 1, group) for p, group in used]
        work = []
        for (p, group), is_due in zip(used, refresh, strict=True):
            self._init_param_state(p, group)
            self.state[p]["step"] += 1
            if p.numel():
                work.append(self._work_of(p, group, is_due))
        return work

    def _check_finite(self, candidates: list[tuple[Tensor, dict[str, Any], str]]) -> list[bool]:
        """Whether each gradient is to be used; raises where its group says so. One device synchronisation in all."""
        checked = [i for i, (_, group, _) in enumerate(candidates) if group["nonfinite"] != "ignore"]
        use = [True] * len(candidates)
        if not checked:
            return use
        device = candidates[checked[0]][0].device
        flags = torch.stack([_grad(candidates[i][0]).isfinite().all().to(device) for i in checked])
        bad = [candidates[i] for i, flag in zip(checked, flags.tolist(), strict=True) if not flag]
        for _, group, name in bad:
            if group["nonfinite"] == "raise":
                raise ValueError(
                    f"gradient of {name} is not finite; nothing was changed. Skip such steps, lower the learning rate, "
                    "or set nonfinite='skip' to pass over the parameter"
                )
        bad_params = {id(p) for p, _, _ in bad}
        self._count("nonfinite_skipped", device, len(bad))
        return [id(p) not in bad_params for p, _, _ in candidates]

    def _init_param_state(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if state:
            return
        layout, dtype = layout_of(tuple(p.shape), group), group["state_dtype"]
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros(p.shape, dtype=dtype, device=p.device)
        state["exp_avg_sq"] = torch.zeros(p.shape, dtype=dtype, device=p.device)
        for dim in layout.factor_dims:
            shape = layout.factor_shape(dim)
            state[f"factor_{dim}"] = torch.zeros(shape, dtype=dtype, device=p.device)
            state[f"basis_{dim}"] = torch.eye(shape[-1], dtype=dtype, device=p.device).expand(shape).clone()

    def _work_of(self, p: Tensor, group: dict[str, Any], is_due: bool) -> _Work:
        layout, state = layout_of(tuple(p.shape), group), self.state[p]
        matrix_state = MatrixState(
            step=int(state["step"].item()),
            exp_avg=layout.as_batch(state["exp_avg"]),
            exp_avg_sq=layout.as_batch(state["exp_avg_sq"]),
            factors={dim: layout.as_batch(state[f"factor_{dim}"]) for dim in layout.factor_dims},
            bases={dim: layout.as_batch(state[f"basis_{dim}"]) for dim in layout.factor_dims},
        )
        return _Work(p, _grad(p), group, layout, matrix_state, refresh=is_due and bool(layout.factor_dims))

    def _update_param(self, item: _Work) -> None:
        w = item.param.detach().to(torch.promote_types(item.param.dtype, item.group["state_dtype"]))
        g = item.grad.to(item.group["state_dtype"])
        self._update(item.layout.as_batch(w), item.layout.as_batch(g), item.state, item.group)
        if w.dtype != item.param.dtype:
            item.param.copy_(w)

    def _refresh_param(self, item: _Work) -> None:
        counts = self._refresh(item.layout.as_batch(item.grad), item.state, item.group)
        device = item.param.device
        self._count("refreshes_done", device, counts.done)
        self._count("refreshes_skipped", device, counts.skipped)
        self._count("refreshes_failed", device, counts.failed)
        if device.type == "cpu" and int(counts.failed):  # elsewhere reading it would wait for the device: see `counters`
            logger.warning(
                "%d eigenbases of a parameter of shape %s could not be refreshed and stay", counts.failed, tuple(item.param.shape)
            )

    def _count(self, name: str, device: torch.device, more: Tensor | int) -> None:
        self._counts[name, device] = self._counts.get((name, device), 0) + more


def _by_option(work: list[_Work], name: str) -> Iterator[tuple[str, list[_Work]]]:
    """The work by the value of a group's option, in order."""
    for value in dict.fromkeys(item.group[name] for item in work):
        yield value, [item for item in work if item.group[name] == value]


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad.detach()


def _param_name(group: Mapping[str, Any], index: int) -> str:
    names = group.get("param_names")
    return f"parameter {names[index]!r}" if names else f"parameter {index} of its group"


def _state_bytes(layout: Layout, options: Mapping[str, Any]) -> int:
    itemsize: int = options["state_dtype"].itemsize
    return layout.state_numel() * itemsize + torch.float32.itemsize


def is_finite_number(value: object) -> bool:
    """A plain finite int or float (bool is not one)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
