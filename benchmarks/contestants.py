"""Contestants and their work: sets of matrices, their gradients, and each library's optimizer set
to the same rule.

All who implement a rule get the same options, `OPTIONS`. SOAP: refresh every f-th step, no merging
of dims, a factor for every dim, no compilation. These differences remain, because the libraries
have no option for them:

    lather             step 1 is Adam in parameter coordinates, and then the first bases; factors'
                       decay rate corrected for bias; the momentum in parameter coordinates where f
                       = 1
    heavyball          step 1 only makes the first bases; factors and moments with bias-corrected
                       decay rates; eps bounds the denominator from below; a refresh leaves columns
                       in their places (no sorting), lifts the factor's null space, fixes signs
    pytorch_optimizer  step 1 only makes the first bases; its count runs one behind, so that
                       refreshes come at steps f+1, 2f+1, ...; factors without bias correction;
                       keeps the momentum in parameter coordinates and projects it in at every step;
                       eps is added before the bias correction
    torch's Muon       multiplies in bfloat16 everywhere; ours where the hardware is fast at it
                       (CUDA, some CPUs), else in float32
    torch's AdamW      nothing: `fused=True`, the fastest that it has. Ours leaves out its check of
                       the gradients (`nonfinite="ignore"`), which reads them once more

The three SOAPs decide the refresh within the step, after the update. Every window of f steps after
the first step holds one of each.

Gradients have the falling spectrum of real ones: A diag(s) X diag(s) B^T with A, B orthogonal and
fixed, X Gaussian and new for each matrix and step, s_i = 1 / i. Shapes: (num_matrices, m, n).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lather.errors import UserError
from lather.optim import SOAP, AdamW, Muon
from lather.shapes import Float

OPTIONS: dict[str, dict[str, Any]] = {
    "soap": {
        "lr": 1e-3,
        "betas": (0.95, 0.95),
        "shampoo_beta": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.01,
    },
    "muon": {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.01, "nesterov": True},
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01},
}
"""The options of each rule that is measured, which all who implement it share."""
NO_LIMIT = 1 << 20
"""A limit on dims that no set reaches, so that every dim gets a factor."""
POOL = 4
"""How many different gradients a parameter has; steps take them in turn."""


def lather_options(rule: str, frequency: int) -> dict[str, Any]:
    """Further options of our optimizer, which are part of each row's configuration. Products are
    fp32 on a GPU, too, as other libraries' are."""
    return {
        "soap": {
            "refresh_method": "auto",
            "momentum_in": "parameter" if frequency == 1 else "basis",
            "fp32_matmul_prec": "highest",
        },
        "muon": {"newton_schulz_dtype": "fastest", "fp32_matmul_prec": "highest"},
        "adamw": {"nonfinite": "ignore"},
    }[rule]


OURS = "lather"
PEERS = {"soap": ("heavyball", "pytorch_optimizer"), "muon": ("torch",), "adamw": ("torch",)}
"""The other libraries that implement a rule."""


@dataclass(frozen=True)
class MatrixSet:
    """Matrices of equal shape. With `experts` > 1 our parameters are 3-D, with so many matrices in
    each; peers' are still 2-D."""

    name: str
    num_matrices: int
    shape: tuple[int, int]
    experts: int = 1

    @property
    def matrix_layout(self) -> str:
        return "per_expert" if self.experts > 1 else "tensor"


@dataclass(frozen=True)
class OptimizerCase:
    """One measurement: a rule on a set of matrices."""

    rule: str
    matrices: MatrixSet
    frequency: int = 1
    """Steps between refreshes; for SOAP alone."""

    def __str__(self) -> str:
        return f"{self.rule} {self.matrices.name}" + (
            f" f={self.frequency}" if self.rule == "soap" else ""
        )

    @property
    def steps_per_round(self) -> int:
        """Steps in whole intervals, at least 2; of AdamW, whose steps take little time, at least
        10."""
        least = 10 if self.rule == "adamw" else 2
        return self.frequency * -(-least // self.frequency)

    def state_bound_bytes(self) -> int:
        """The most state that our optimizer may have: m + n floats per matrix, and 2mn + 2m^2 +
        2n^2 more for SOAP, mn for Muon, 2mn for AdamW."""
        m, n = self.matrices.shape
        floats = {"soap": 2 * m * n + 2 * m * m + 2 * n * n, "muon": m * n, "adamw": 2 * m * n}
        return 4 * self.matrices.num_matrices * (floats[self.rule] + m + n)

    def contestant(self, name: str, pool: Sequence[Tensor], **more: Any) -> Contestant:
        return make_contestant(name, self.matrices, self.frequency, pool, rule=self.rule, **more)


SETS = {
    s.name: s
    for s in (
        MatrixSet("many_small", 128, (64, 128)),
        MatrixSet("experts", 128, (128, 256)),
        MatrixSet("experts_3d", 128, (128, 256), experts=16),
        MatrixSet("wide", 24, (256, 512)),
        MatrixSet("big", 4, (768, 2048)),
        MatrixSet("tiny", 6, (8, 16)),
        MatrixSet("tiny_3d", 8, (8, 16), experts=4),
    )
}
DEFAULT_SETS = ("many_small", "experts", "experts_3d", "wide", "big")


@dataclass
class Contestant:
    """A library's optimizer with its parameters and gradients."""

    name: str
    params: list[Tensor]
    optimizer: Optimizer
    gradients: list[list[Tensor]]
    """Gradients by step in the pool, then by parameter."""
    num_steps: int = field(default=0)

    def set_gradients(self) -> None:
        """Point each parameter to its next gradient; the timed step leaves this out."""
        for p, g in zip(
            self.params, self.gradients[self.num_steps % len(self.gradients)], strict=True
        ):
            p.grad = g

    def step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1


def gradient_pool(
    matrices: MatrixSet,
    device: torch.device,
    *,
    num_steps: int = POOL,
    decay: Callable[[Tensor], Tensor] = torch.reciprocal,
) -> list[Float[Tensor, "num_matrices m n"]]:
    """Draw `num_steps` gradients of every matrix; `decay` gives s_i for i = 1, 2, ... They are the
    same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    m, n = matrices.shape
    left, right = (
        torch.linalg.qr(torch.randn(size, size, generator=generator)).Q for size in (m, n)
    )
    left, right = (q * decay(torch.arange(1.0, len(q) + 1)) for q in (left, right))
    pool = (torch.randn(matrices.num_matrices, m, n, generator=generator) for _ in range(num_steps))
    return [(left @ x @ right.mT).to(device) for x in pool]


def make_contestant(
    name: str,
    matrices: MatrixSet,
    frequency: int,
    pool: Sequence[Tensor],
    *,
    rule: str = "soap",
    **more: Any,
) -> Contestant:
    """Make a contestant that has taken no step; all start from the same parameters. `more` are
    further options of our optimizer."""
    generator = torch.Generator().manual_seed(1)
    weights = (0.02 * torch.randn(matrices.num_matrices, *matrices.shape, generator=generator)).to(
        pool[0]
    )
    experts = matrices.experts if name == OURS else 1

    def split(batch: Tensor) -> list[Tensor]:
        return [part.clone() if experts > 1 else part[0].clone() for part in batch.split(experts)]

    params: list[Tensor] = [torch.nn.Parameter(w) for w in split(weights)]
    if name == OURS:
        optimizer = _ours(
            rule, params, frequency, {"matrix_layout": matrices.matrix_layout, **more}
        )
    else:
        optimizer = THEIRS[rule, name](params, frequency)
    return Contestant(name, params, optimizer, [split(g) for g in pool])


def _ours(rule: str, params: list[Tensor], frequency: int, more: dict[str, Any]) -> Optimizer:
    options = {**OPTIONS[rule], **lather_options(rule, frequency), **more}
    if rule == "soap":
        return SOAP(params, precondition_frequency=frequency, **options)
    if rule == "muon":
        return Muon(params, **options)
    del options["matrix_layout"]  # AdamW is element-wise, and has no layouts
    return AdamW(params, **options)


def _heavyball_soap(params: list[Tensor], frequency: int) -> Optimizer:
    import heavyball
    import heavyball.utils

    heavyball.utils.compile_mode = None  # heavyball has no other switch
    optimizer: Any = heavyball.SOAP(
        params,
        **OPTIONS["soap"],
        precondition_frequency=frequency,
        max_precond_dim=NO_LIMIT,
        merge_dims=False,
        use_precond_schedule=False,
        compile_step=False,
    )
    optimizer.consume_grad = False  # otherwise a step sets p.grad to None
    # heavyball adds up 1/f in floating point, which for f = 10 refreshes at steps 11, 20, 30, ...;
    # this adds up whole numbers.
    optimizer.precond_schedule = lambda step: float(step % frequency == 0)
    checked: Optimizer = optimizer
    return checked


def _pytorch_optimizer_soap(params: list[Tensor], frequency: int) -> Optimizer:
    import pytorch_optimizer

    optimizer: Optimizer = pytorch_optimizer.SOAP(
        params,
        **OPTIONS["soap"],
        precondition_frequency=frequency,
        max_precondition_dim=NO_LIMIT,
        merge_dims=False,
    )
    return optimizer


def _torch_muon(params: list[Tensor], frequency: int) -> Optimizer:
    return torch.optim.Muon(params, **OPTIONS["muon"], adjust_lr_fn="match_rms_adamw")


def _torch_adamw(params: list[Tensor], frequency: int) -> Optimizer:
    return torch.optim.AdamW(params, **OPTIONS["adamw"], fused=True)


THEIRS: dict[tuple[str, str], Callable[[list[Tensor], int], Optimizer]] = {
    ("soap", "heavyball"): _heavyball_soap,
    ("soap", "pytorch_optimizer"): _pytorch_optimizer_soap,
    ("muon", "torch"): _torch_muon,
    ("adamw", "torch"): _torch_adamw,
}
"""Functions that make another library's optimizer, by rule and library."""


def check_installed(peers: Sequence[str]) -> None:
    """Raises UserError, with the command to give, if a peer is missing."""
    missing = [peer for peer in peers if importlib.util.find_spec(peer) is None]
    if missing:
        raise UserError(
            f"lather bench optimizer compares with {' and '.join(missing)}, not installed here: "
            "pip install 'lather[bench]', or give --peers none"
        )
