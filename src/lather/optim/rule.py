"""The contract of a rule: all that a researcher has to know of the engine to write an optimizer.

A rule is a frozen dataclass. Its fields are its options (`lather.optim.options`); its methods are the mathematics, on batches of equal
matrices: a gradient g is (B, m, n), an entry of state (B, ...). They never see a parameter, a rank, a stored dtype or a bucket, and work
in fp32 (fp64 if state is kept in it). A step calls `statistics`, `refresh`, `update` in this order if the rule `refreshes_first`, else
`statistics`, `update`, `refresh`; and of these only what the rule has. Weights change by W = (1 - decay) W - lr U, which is the engine's,
as are all options of `Rule` itself.

    Rule              any rule: `state` and `update` are enough
    RefreshingRule    a rule with bases, roots or the like, that are renewed now and then: `dims` and `refresh`, too
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lather.optim.options import Bytes, Count, Interval, Precision, Rate, StateDtype, Steps, check, dtype_option, is_count

R = TypeVar("R", bound="Rule")

Tensors = Sequence[Tensor]

MAX_BF16_BETA = 1 - 2**-8
"""Largest decay rate that bf16 can carry out."""


@dataclass(frozen=True)
class Matrix:
    """The matrix that a rule is asked about: one of the equal matrices of a parameter."""

    shape: tuple[int, ...]
    """Shape, usually (m, n); () or (n,) for scalars and vectors, more dims for a tensor."""
    num_dims: int
    """Number of dims of the whole parameter: 3 for a matrix that is one of a stack of experts."""

    @property
    def is_matrix(self) -> bool:
        """Whether there are two dims, neither of them empty."""
        return len(self.shape) == 2 and 0 not in self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """One tensor of state, per matrix of a batch."""

    shape: tuple[int, ...]
    kind: Literal["moment", "basis", "statistic"] = "statistic"
    """Which part of `state_dtype` it follows: "moment" (of the shape of the matrix) or "basis"; a statistic is never below fp32."""
    initial: float | None = 0.0
    """Value before the first step; None: the identity matrix."""


class State(dict[str, Tensor]):
    """The state of a batch by name, each entry (B, ...); a rule changes it in place."""

    active: Tensor | None = None
    """Indices of the matrices that saw a gradient, where some are experts without tokens: statistics of the others stay. None: all did."""
    weights: Tensor | None = None
    """W (B, ...), to be read, where the rule `couples_decay`; otherwise None."""

    def by_dim(self, name: str) -> dict[int, Tensor]:
        """The entries `name_0`, `name_1`, ... that there are, by number."""
        start = len(name) + 1
        return {int(key[start:]): x for key, x in self.items() if key.startswith(name) and key[start:].isdigit()}


@dataclass(frozen=True)
class Due:
    """The matrices whose bases a step renews."""

    who: Literal["nobody", "everybody", "interval"]
    """interval: those whose interval is full; with `stagger_refresh` each at a step of its own."""
    every: int = 1
    """The interval, steps."""
    first: bool = False
    """Whether these are the first bases: experts without tokens take part, and no basis is good enough to stay."""


NOBODY = Due("nobody")


@dataclass(frozen=True)
class Rule:
    """Base of all rules, with the options that every rule has."""

    lr: Rate
    """Learning rate; a one-element tensor is allowed."""
    _: KW_ONLY
    weight_decay_method: Literal["decoupled", "independent", "palm", "l2"] = "decoupled"
    """decoupled: W -= lr wd W; independent: W -= wd W; palm: W -= lr^2 wd W; l2: wd W is added to the gradient."""
    keep_norm: bool = False
    """Keep every matrix at the Frobenius norm that it had at its first step (hyperball): U is scaled to that norm, W is scaled back to it.
    Without weight decay. Vectors, and matrices that start at zero, are not scaled."""
    matrix_layout: Literal["tensor", "per_expert", "stacked"] = "tensor"
    """Layout of a parameter of 3 dims or more: tensor, one tensor; per_expert, a batch of independent matrices along the leading dim;
    stacked, the one matrix (m, b*n) if n <= m, else (b*m, n)."""
    maximize: bool = False
    """Ascend instead of descend."""
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    """A non-finite gradient: raise before anything changes, skip that parameter and count it, or go on."""
    state_dtype: StateDtype = torch.float32
    """dtype of the state, whatever the parameter's: float32, float64 (then all arithmetic is fp64) or bfloat16 for moments and bases, while
    statistics stay fp32; {"moments": dtype} or {"bases": dtype} set one of the two. In text: "bfloat16", "moments=bfloat16"."""
    max_state_bytes: Bytes = None
    """Refuse a parameter whose state would take more bytes."""
    batched: bool = True
    """Work on equal matrices together; off: one by one, with the same result to rounding."""
    bucket_bytes: Bytes = None
    """Bound on the temporary memory of a step, bytes (that of one matrix is the least). None: 256 MiB, and on a GPU a quarter of what is
    free there at the first step, 2 to 4 GiB."""
    num_streams: Count = 1
    """CUDA streams over which batches are spread (the most that any group asks for)."""
    fp32_matmul_prec: Precision = "auto"
    """torch's fp32 matmul precision for statistics and update; auto: high (TF32) on a GPU, highest on a CPU."""
    ownership: Literal["whole", "replicated"] = "whole"
    """Owner of a matrix spread over ranks: whole, one rank keeps its state and works on it; replicated, all keep rows of it, gather them
    in each step and compute the same, for state that no rank can keep."""
    tp_group: Any = field(default=None, metadata={"group": False}, repr=False, compare=False)
    """Process group of tensor-parallel shards that are plain tensors, of the whole optimizer; their groups say `partition_dim`."""

    name: ClassVar[str] = ""
    """Name under which it is registered; empty for rules outside of the package, which go by `module:Class`."""
    moment_decays: ClassVar[tuple[str, ...]] = ("betas", "momentum")
    """Options that are decay rates of moments, which bf16 state limits."""
    elementwise: ClassVar[bool] = False
    """Whether every element of an update depends on that element alone: parameters of all shapes then share batches."""
    refreshes_first: ClassVar[bool] = False
    """Whether bases are renewed before the update that uses them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "state_dtype", dtype_option(self.state_dtype))
        check(self)
        self._check_decay_rates()

    def _check_decay_rates(self) -> None:
        """bf16 has 8 significant bits: a moment in it cannot decay by less than 1 part in 256."""
        moments = self.state_dtype.get("moments") if isinstance(self.state_dtype, Mapping) else self.state_dtype
        for name in self.moment_decays if moments is torch.bfloat16 else ():
            value = getattr(self, name, 0.0)
            value = tuple(value) if isinstance(value, tuple | list) else value
            if max(value if isinstance(value, tuple) else (value,)) > MAX_BF16_BETA:
                raise ValueError(
                    f"{name}={value!r} with bf16 moments: a moment that decays by less than 1 part in 256 per step is rounded back to "
                    f"what it was. Give {name} up to {MAX_BF16_BETA}, or keep the moments in fp32: state_dtype={{'bases': torch.bfloat16}}"
                )

    # --- what a rule provides ---------------------------------------------------------------------------------------------------------

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        """The state that is kept of a matrix, by name; `step` aside, which every parameter has."""
        raise NotImplementedError

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        """U (B, m, n), of which lr times is subtracted. Moments change in place; g does not. t is 1 at the first gradient."""
        raise NotImplementedError

    def statistics(self, g: Tensor, s: State, t: int) -> None:
        """Take g into statistics that a refresh reads, in place; for the rows `s.active`."""

    def on(self, matrix: Matrix) -> Rule:
        """The rule for this matrix: this one, or another that handles what this one does not (vectors, say)."""
        return self

    def on_vectors(self) -> Rule:
        """The rule for vectors, and for all that this one has no matrix in; a group with `rule="adamw"` has its options from here."""
        return self

    def dims(self, matrix: Matrix) -> tuple[int, ...]:
        """The dims of the matrix that have a basis, ascending; each is refreshed by itself. Only a `RefreshingRule` has any."""
        return ()

    def step_whole(self, weights: Tensors, grads: Tensors, states: Mapping[str, Tensors], t: int, lr: float) -> bool:
        """Take the whole step of these flat tensors in place, if there is a kernel for it. Only elementwise rules are asked; the answer is
        whether it was done."""
        return False

    def cost(self, matrix: Matrix) -> float:
        """Flops of a step, relative to other matrices': ranks share out matrices by it."""
        dims = self.dims(matrix)
        without = matrix.numel * (min(matrix.shape) if matrix.is_matrix else 1)
        return float(sum(matrix.shape[dim] ** 3 + matrix.numel * matrix.shape[dim] for dim in dims) or without)

    # --- weight decay: fields `weight_decay` (a number) and `weight_decay_method` -------------------------------------------------------

    @property
    def weight_decay(self) -> float:
        """wd; a rule that has weight decay declares a field of this name."""
        return 0.0

    @property
    def couples_decay(self) -> bool:
        """Whether weight decay is added to the gradient: `State.weights` are then there, for `decayed`."""
        return bool(self.weight_decay) and self.weight_decay_method == "l2" and not self.keep_norm

    def decayed(self, g: Tensor, s: State) -> Tensor:
        """g, or g + wd W where decay is coupled."""
        return g if s.weights is None or not self.couples_decay else g.add(s.weights, alpha=self.weight_decay)

    def decay(self, lr: float) -> float:
        """The share of W that decay takes away in a step, apart from the gradient."""
        share = {"decoupled": lr, "independent": 1.0, "palm": lr * lr, "l2": 0.0}[self.weight_decay_method]
        return 0.0 if self.keep_norm else share * float(self.weight_decay)

    def turned_into(self, rule: type[R], **options: Any) -> R:
        """A rule of another class with this one's values of the options that both have, and `options`."""
        own = {one.name for one in fields(self)}
        return rule(**{**{one.name: getattr(self, one.name) for one in fields(rule) if one.name in own}, **options})


@dataclass(frozen=True)
class RefreshingRule(Rule):
    """Base of rules that renew something now and then, dim by dim: when, how it is tried, and what follows."""

    _: KW_ONLY
    precondition_frequency: Interval = 1
    """Steps between refreshes; in Python also a callable of the step (`lather.optim.schedules`)."""
    precondition_warmup_steps: Steps = 0
    """Refresh at every step up to this one."""
    stagger_refresh: bool = False
    """Spread refreshes over the steps of an interval by cost, so that no step pays for all of them."""
    stagger_first: bool = False
    """With `stagger_refresh` spread the first refreshes over an interval, too; a matrix keeps its own coordinates until then."""
    async_refresh: bool = False
    """On CUDA refresh on a side stream beside the next forward and backward. It then follows the update, in every rule: the numbers are
    the same on every device, but for a rule that refreshes first not those of a refresh before the update."""
    qr_fp32_matmul_prec: Literal["highest", "high", "medium"] = "highest"
    """torch's fp32 matmul precision for refreshes, on every device; TF32 there loses small eigenvalues and orthonormality."""

    @property
    def first_refresh(self) -> int:
        """The step that makes the first bases, or begins to with `stagger_first`."""
        return 1

    def due(self, t: int) -> Due:
        """The matrices whose bases step t renews. Raises ValueError if `precondition_frequency` gives anything but an integer >= 1."""
        since = t - self.first_refresh
        is_spread = self.stagger_refresh and self.stagger_first and self.first_refresh >= self.precondition_warmup_steps
        if since < 0:
            return NOBODY
        if since == 0 and not is_spread:
            return Due("everybody", first=True)
        f = self.precondition_frequency
        if callable(f):
            f = f(t)
            if not is_count(f, 1):
                raise ValueError(f"precondition_frequency gives {f!r} for step {t}: it must give an integer >= 1")
        if t <= self.precondition_warmup_steps:
            return Due("everybody")
        return Due("interval", f, first=is_spread and since < f) if self.stagger_refresh or t % f == 0 else NOBODY

    def refresh(self, s: State, dim: int, method: str, first: bool) -> Tensor | None:
        """Renew what dim `dim` has, and turn with it whatever is kept in its coordinates, in place. Returns which matrices failed (B,),
        of which nothing may have changed; None: it cannot fail."""
        raise NotImplementedError

    def methods(self, first: bool) -> tuple[str, ...]:
        """Names for ways to refresh: each is tried on what the one before it failed on."""
        return ("",)

    def fits(self, s: State, dim: int) -> Tensor | None:
        """Which matrices (B,) need no refresh of this dim now; None: nobody asks."""
        return None

    def refresh_cost(self, matrix: Matrix) -> float:
        """Flops of one refresh of a matrix, to first order; staggering spreads it evenly."""
        dims = self.dims(matrix)
        return sum((2 + 8 / 3) * matrix.shape[dim] ** 3 + 4 * matrix.shape[dim] * matrix.numel for dim in dims)


def rms(u: Tensor) -> Tensor:
    """Root mean square of each matrix of u, (B,)."""
    return u.reshape(len(u), -1).square().mean(1).sqrt()


def column(x: Tensor, like: Tensor) -> Tensor:
    """x (B,) as (B, 1, ..., 1), to multiply each matrix of `like` with."""
    return x.view((len(x),) + (1,) * (like.dim() - 1))
