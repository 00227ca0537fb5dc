"""The contract of a rule: everything that a researcher must know about the engine to write an
optimizer.

A rule is a frozen dataclass. Its fields are its options (`lather.optim.options`); its methods are
the mathematics, on batches of matrices of equal shape: a gradient g is (B, m, n), an entry of the
state (B, ...). The methods never see a parameter, a rank, a stored dtype or a bucket, and work in
fp32 (in fp64 if the state is). A step calls `statistics`, `refresh`, `update` in this order if the
rule `refreshes_first`, otherwise `statistics`, `update`, `refresh`; it leaves out those that the
rule does not define. The engine then changes the weights, W = (1 - decay) W - lr U, and implements
all options that `Rule` itself has.

    Rule              any rule; it must define `state` and `update`
    RefreshingRule    a rule with bases, roots or the like that are refreshed only every few steps;
                      it must also define `dims` and `refresh`
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lather.optim.controls import Controls, check_controls
from lather.optim.linalg.scale import norms
from lather.optim.options import Count, Extent, Interval, Precision, Rate, StateDtype, Steps, check
from lather.optim.plain import as_count, is_count

R = TypeVar("R", bound="Rule")

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Matrix:
    """One of the matrices of equal shape that a parameter consists of, as the methods of a rule
    receive it."""

    shape: tuple[int, ...]
    """Shape, usually (m, n); () or (n,) for scalars and vectors, more dims for a tensor."""
    num_dims: int
    """Number of dims of the whole parameter: 3 for a matrix out of a stack of experts."""

    @property
    def is_matrix(self) -> bool:
        """Whether the shape has two dims, and neither is empty."""
        return len(self.shape) == 2 and 0 not in self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """One tensor of the optimizer state of a matrix."""

    shape: tuple[int, ...]
    kind: Literal["moment", "basis", "factor", "statistic"] = "statistic"
    """Part of `state_dtype` that sets the stored dtype. moment: has the shape of the matrix; basis:
    a matrix that `refresh` alone changes; factor: a symmetric, positive semidefinite matrix, of
    which one triangle is stored; a statistic is at least fp32."""
    initial: float | None = 0.0
    """Value before the first step; None: the identity matrix."""
    nonnegative: bool = False
    """Whether no element is ever negative, as in second moments."""


class State(UserDict[str, Tensor]):
    """The optimizer state of a batch of matrices: name -> entry (B, ...), which a rule changes in
    place."""

    active: Tensor | None = None
    """Indices of the matrices with a gradient, if there are experts without tokens, whose
    statistics must not change; otherwise None."""
    weights: Tensor | None = None
    """Weights W (B, ...), for reading, if the rule `couples_decay` or controls the step by them;
    otherwise None."""
    gradient_factor: float = 1.0
    """Number by which the rule multiplies g; other than 1 only if it `takes_factor`."""

    def by_dim(self, name: str) -> dict[int, Tensor]:
        """Return those of the entries `name_0`, `name_1`, ... that exist, by dim."""
        start = len(name) + 1
        return {
            int(key[start:]): self[key]
            for key in self
            if key.startswith(name) and key[start:].isdigit()
        }


@dataclass(frozen=True)
class Due:
    """The matrices whose bases a step refreshes."""

    who: Literal["nobody", "everybody", "interval"]
    """interval: the matrices whose interval ends at this step; with `stagger_refresh` intervals end
    at different steps."""
    every: int = 1
    """The interval in steps."""
    first: bool = False
    """Whether these are the first bases: experts without tokens get a basis, too, and no basis is
    skipped because it still fits."""


NOBODY = Due("nobody")


@dataclass(frozen=True)
class Rule(Controls):
    """Base class of all rules, with the options that every rule has."""

    lr: Rate
    """Learning rate; a one-element tensor is allowed."""
    _: KW_ONLY
    weight_decay_method: Literal["decoupled", "independent", "palm", "l2"] = "decoupled"
    """decoupled: W -= lr wd W; independent: W -= wd W; palm: W -= lr^2 wd W; l2: wd W is added to
    the gradient."""
    weight_rounding: Literal["nearest", "stochastic", "remainder"] = "nearest"
    """Rounding of a new weight of a bf16 parameter. nearest: a change of less than half a unit in
    the last place is lost; stochastic: up or down at random, so that no change is lost on average;
    remainder: what rounding drops is kept in the state (2 bytes per weight), and the run is that of
    fp32 parameters. Parameters in fp32 and fp64 are not rounded."""
    matrix_layout: Literal["tensor", "per_expert", "stacked", "per_head"] = "tensor"
    """Layout of a parameter of 3 dims or more. tensor: one tensor; per_expert: a batch of
    independent matrices along the leading dim; stacked: a stack (b, m, n) is one matrix, (m, b*n)
    if n <= m, otherwise (b*m, n). Of 2 dims, per_head: the heads of a matrix of attention are
    matrices of their own."""
    head_rows: Extent = None
    """With `per_head`: rows of a head; heads follow each other along the rows of a parameter."""
    head_columns: Extent = None
    """With `per_head`, in place of `head_rows`: columns of a head, for weights (in, out)."""
    maximize: bool = False
    """Maximize the objective instead of minimizing it."""
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    """Handling of a gradient that is not finite, or whose square is not in the dtype of the
    arithmetic. raise: raise ValueError before anything changes; skip: leave that parameter as it is
    and count it; ignore: take the step with it."""
    state_dtype: StateDtype = None
    """dtype of state and arithmetic. None: float64 for float64 parameters, otherwise float32.
    bfloat16 is for moments and bases: factors, statistics and arithmetic stay fp32. int8 keeps
    these in 8 bits with a scale per block, and factors in int16, in units of their diagonals;
    vectors, and entries with fewer than 4,096 elements, stay fp32. {"moments": dtype, "bases":
    dtype, "factors": dtype} sets some of the parts. As text: "float64" or
    "moments=int8,factors=int16"."""
    max_state_bytes: Extent = None
    """Largest state of a parameter in bytes; a parameter that needs more is refused. None: no
    limit."""
    batched: bool = True
    """Update matrices of equal shape as one batch. Off: one at a time, with the same result up to
    rounding."""
    bucket_bytes: Extent = None
    """Limit on the temporary memory of a step in bytes; one matrix is updated even if it needs
    more. None: 256 MiB on a CPU, 4 GiB on a GPU."""
    num_streams: Count = 1
    """Number of CUDA streams that share the batches of a step."""
    offload: bool = False
    """Keep the state in pinned memory of the host. The rows of a batch visit the GPU for their part
    of a step, while those of the next are fetched. Remainders of bf16 weights stay on the GPU. On a
    CPU it changes nothing."""
    fp32_matmul_prec: Precision = "auto"
    """fp32 matmul precision of statistics and updates, by torch's names. auto: high (TF32) on a
    GPU, highest on a CPU."""
    ownership: Literal["whole", "replicated"] = "whole"
    """Division of the work on a parameter that is spread over ranks. whole: one rank owns a matrix,
    keeps its state and computes its update; replicated: every rank keeps some rows of the state,
    gathers the others in each step and computes the same update. That is for state that does not
    fit on one rank."""
    tp_group: Any = field(default=None, metadata={"group": False}, repr=False, compare=False)
    """Process group of tensor-parallel shards that are plain tensors, for the whole optimizer;
    their groups have a `partition_dim`."""

    name: ClassVar[str] = ""
    """Name under which the rule is registered; empty for a rule outside of the package, whose name
    is `module:Class`."""
    moment_decays: ClassVar[tuple[str, ...]] = ("betas", "momentum")
    """Names of the options that are decay rates of moments; bf16 moments limit them
    (`lather.optim.options.MAX_BF16_BETA`)."""
    optional_entries: ClassVar[tuple[str, ...]] = ()
    """Names of entries that the state has under some options alone. A saved state may lack them,
    which then have their initial values, and those that the options do not ask for are dropped."""
    elementwise: ClassVar[bool] = False
    """Whether each element of an update depends on that element alone; parameters of all shapes
    then share batches."""
    refreshes_first: ClassVar[bool] = False
    """Whether a step refreshes the bases before its update, instead of after it."""

    def __post_init__(self) -> None:
        check(self)
        check_controls(self)

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """dtype of each kind of entry of the state. That of statistics is also the dtype of all
        arithmetic: fp64 if moments and bases are (`rule_for_dtype`), otherwise fp32."""
        dtype: Any = self.state_dtype or torch.float32
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        parts: Mapping[str, torch.dtype] = {"moments": dtype, "bases": dtype}
        if isinstance(dtype, Mapping):
            parts = dtype
        elif dtype is torch.int8:
            parts = {**parts, "factors": torch.int16}
        return {
            "moment": parts.get("moments", wide),
            "basis": parts.get("bases", wide),
            "factor": parts.get("factors", wide),
            "statistic": wide,
        }

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of all arithmetic and of statistics."""
        return self.dtypes["statistic"]

    # --- what a rule provides ---------------------------------------------------------------------

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        """Return the entries of the optimizer state of a matrix by name, without `step`, which
        every parameter has."""
        raise NotImplementedError

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        """Return the update U (B, m, n), without lr, in the dtype of g or in bf16. Change the
        state in place (moments, and the statistics of a rule without a `statistics` method), but
        not g. t is 1 at the first gradient."""
        raise NotImplementedError

    def statistics(self, g: Tensor, s: State, t: int) -> None:
        """Add g to the statistics from which bases are refreshed, in place, for the matrices
        `s.active` alone."""

    def on(self, matrix: Matrix) -> Rule:
        """Return the rule for this matrix: this rule, or another for matrices that it cannot handle
        (vectors, for example)."""
        return self

    def on_vectors(self) -> Rule:
        """Return the rule for parameters without a matrix, such as vectors; a group with
        `rule="adamw"` takes its defaults from it."""
        return self

    def dims(self, matrix: Matrix) -> tuple[int, ...]:
        """Return the dims of the matrix that have a factor or a basis, ascending. If there are any,
        experts without gradient are left out (`State.active`); a `RefreshingRule` refreshes each
        dim separately."""
        return ()

    def due(self, t: int) -> Due:
        """Return which matrices step t refreshes: none, unless the rule is a `RefreshingRule`."""
        return NOBODY

    def step_whole(
        self, weights: Tensors, grads: Tensors, states: Mapping[str, Tensors], t: int, lr: float
    ) -> bool:
        """Take the step of contiguous tensors in place if a kernel can; return whether it did."""
        return False

    def cost(self, matrix: Matrix) -> float:
        """Return the flops of a step, in relation to those of other matrices: the engine balances
        the work of the ranks by it."""
        sizes = [matrix.shape[dim] for dim in self.dims(matrix)]
        without = matrix.numel * (min(matrix.shape) if matrix.is_matrix else 1)
        return float(sum(n**3 + matrix.numel * n for n in sizes) or without)

    @property
    def takes_factor(self) -> bool:
        """Whether `update` multiplies g by `State.gradient_factor` on a GPU, in the kernel that
        reads it; for all other rules the engine multiplies gradients in place before the step."""
        return False

    # --- weight decay: fields `weight_decay` (a number) and `weight_decay_method` -----------------

    @property
    def weight_decay(self) -> float:
        """Weight decay wd; a rule that has weight decay declares a field of this name."""
        return 0.0

    @property
    def couples_decay(self) -> bool:
        """Whether weight decay is added to the gradient; `State.weights`, which `decayed` reads,
        are then set."""
        return bool(self.weight_decay) and self.weight_decay_method == "l2" and not self.keep_norm

    def decayed(self, g: Tensor, s: State) -> Tensor:
        """Return g + wd W if weight decay is coupled, otherwise g."""
        if s.weights is None or not self.couples_decay:
            return g
        return g.add(s.weights, alpha=self.weight_decay)

    def decay(self, lr: float) -> float:
        """Return the fraction of W that decoupled weight decay subtracts in a step."""
        share = {"decoupled": lr, "independent": 1.0, "palm": lr * lr, "l2": 0.0}[
            self.weight_decay_method
        ]
        return 0.0 if self.keep_norm else share * float(self.weight_decay)

    @property
    def decays_cautiously(self) -> bool:
        """Whether weight decay depends on the signs of update and weights."""
        return self.cautious_decay and self.decay(1.0) > 0

    def turned_into(self, rule: type[R], **options: Any) -> R:
        """Return a rule of another class with this rule's values of the options that both have,
        except for those given in `options`."""
        shared = {field.name for field in fields(self)} & {field.name for field in fields(rule)}
        return rule(**{name: getattr(self, name) for name in shared} | options)


@dataclass(frozen=True)
class RefreshingRule(Rule):
    """Base class of rules with bases, or something like them, that are refreshed for each dim
    separately, and not at every step."""

    _: KW_ONLY
    precondition_frequency: Interval = 1
    """Steps between refreshes. In Python it may also be a function of the step
    (`lather.optim.schedules`)."""
    precondition_warmup_steps: Steps = 0
    """Number of steps at the start of the run in each of which bases are refreshed."""
    stagger_refresh: bool = False
    """Distribute the refreshes over the steps of an interval, so that every step costs about the
    same."""
    stagger_first: bool = False
    """With `stagger_refresh`: distribute the first refreshes over an interval, too; until then a
    matrix has the identity as basis."""
    async_refresh: bool = False
    """Refresh on a CUDA side stream during the next forward and backward pass. Refreshes then
    always come after the update, on every device: KL-SOAP and other rules that otherwise refresh
    before the update give different results with this option."""
    qr_fp32_matmul_prec: Literal["highest", "high", "medium"] = "highest"
    """fp32 matmul precision of refreshes and first bases, by torch's names. highest: true fp32; on
    a GPU the products of factors of 512 rows and more, a multiple of 8, are three bf16 products
    where their error (5e-6) does no harm, unless refresh_method is qr or cholesky_qr. In TF32
    (high), small eigenvalues and orthonormality are lost."""

    @property
    def first_refresh(self) -> int:
        """The step that computes the first bases; with `stagger_first`, the first step that
        computes any of them."""
        return 1

    def due(self, t: int) -> Due:
        """Return which matrices step t refreshes. Raises ValueError if `precondition_frequency`
        gives no integer >= 1."""
        since = t - self.first_refresh
        is_spread = (
            self.stagger_refresh
            and self.stagger_first
            and self.first_refresh >= self.precondition_warmup_steps
        )
        if since < 0:
            return NOBODY
        if since == 0 and not is_spread:
            return Due("everybody", first=True)
        f = self.precondition_frequency
        if callable(f):
            f = as_count(f(t))
            if not is_count(f, 1):
                raise ValueError(
                    f"precondition_frequency gives {f!r} for step {t}: it must give an integer >= 1"
                )
        if t <= self.precondition_warmup_steps:
            return Due("everybody")
        if not self.stagger_refresh and t % f:
            return NOBODY
        return Due("interval", f, first=is_spread and since < f)

    def refresh(self, s: State, dim: int, method: str, first: bool) -> Tensor | None:
        """Refresh the basis of dim `dim` in place, and rotate the state that is in its
        coordinates. Return which matrices failed (B,), whose state must be unchanged, or None if a
        refresh cannot fail."""
        raise NotImplementedError

    def methods(self, first: bool) -> tuple[str, ...]:
        """Return the names of the refresh methods in the order in which the engine tries them: each
        on the matrices that failed before."""
        return ("",)

    def fits(self, s: State, dim: int) -> Tensor | None:
        """Return which matrices (B,) need no refresh of this dim now, or None if all are to be
        refreshed."""
        return None

    def refresh_cost(self, matrix: Matrix) -> float:
        """Return the flops of one refresh of a matrix, to first order; `stagger_refresh`
        distributes refreshes by it."""
        sizes = [matrix.shape[dim] for dim in self.dims(matrix)]
        return sum((2 + 8 / 3) * n**3 + 4 * n * matrix.numel for n in sizes)


def rms(u: Tensor) -> Tensor:
    """Return the root mean square of each matrix of u, (B,)."""
    return norms(u) / math.sqrt(math.prod(u.shape[1:]))
