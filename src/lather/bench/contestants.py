"""Who is measured and on what: sets of matrices, their gradients, and each library's SOAP set to the same rule.

The rule: `RULE`, refresh every f-th step, no merging of dims, a factor for every dim, no compilation. What stays different, because the
libraries have no option for it:

    lather             step 1 is Adam in parameter coordinates, and then the first bases; factors' decay rate corrected for bias
    heavyball          step 1 only makes the first bases; factors and moments with bias-corrected decay rates; eps bounds the denominator
                       from below; a refresh leaves columns in their places (no sorting), lifts the factor's null space, fixes signs
    pytorch_optimizer  step 1 only makes the first bases; its count runs one behind, so that refreshes come at steps f+1, 2f+1, ...;
                       factors without bias correction; keeps the momentum in parameter coordinates and projects it in at every step;
                       eps is added before the bias correction

All three decide the refresh within the step, after the update. Every window of f steps after the first step holds one refresh of each.

Gradients have the falling spectrum of real ones: A diag(s) X diag(s) B^T with A, B orthogonal and fixed, X Gaussian and new for
each matrix and step, s_i = 1 / i. Shapes: (num_matrices, m, n).
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
from lather.optim import SOAP
from lather.shapes import Float

RULE: dict[str, Any] = {"lr": 1e-3, "betas": (0.95, 0.95), "shampoo_beta": 0.95, "eps": 1e-8, "weight_decay": 0.01}
LATHER_OPTIONS: dict[str, Any] = {"refresh_method": "auto"}
"""Further options of our own SOAP in all rows; they are part of each row's configuration."""
NO_LIMIT = 1 << 20
"""A dim that no set reaches: every dim gets a factor."""
POOL = 4
"""Different gradients per parameter; steps take them in turn."""

OURS = "lather"
PEERS = ("heavyball", "pytorch_optimizer")


@dataclass(frozen=True)
class MatrixSet:
    """`num_matrices` of one shape; with `experts` > 1 ours are 3-D parameters of that many matrices, peers' still 2-D ones."""

    name: str
    num_matrices: int
    shape: tuple[int, int]
    experts: int = 1

    @property
    def matrix_layout(self) -> str:
        return "per_expert" if self.experts > 1 else "tensor"

    def state_bound_bytes(self) -> int:
        """Most state that ours may have: 2mn + 2m^2 + 2n^2 + m + n floats per matrix."""
        m, n = self.shape
        return 4 * self.num_matrices * (2 * m * n + 2 * m * m + 2 * n * n + m + n)


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
    """One library's optimizer with parameters and gradients of its own."""

    name: str
    params: list[Tensor]
    optimizer: Optimizer
    gradients: list[list[Tensor]]
    """[step in the pool][parameter]"""
    num_steps: int = field(default=0)

    def set_gradients(self) -> None:
        """The next step's gradients, by reference; not part of the timed step."""
        for p, g in zip(self.params, self.gradients[self.num_steps % len(self.gradients)], strict=True):
            p.grad = g

    def step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1


def gradient_pool(
    matrices: MatrixSet, device: torch.device, *, num_steps: int = POOL, decay: Callable[[Tensor], Tensor] = torch.reciprocal
) -> list[Float[Tensor, "num_matrices m n"]]:
    """`num_steps` gradients of every matrix; `decay` gives s_i for i = 1, 2, ... The same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    m, n = matrices.shape
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=generator)).Q for size in (m, n))
    left, right = (q * decay(torch.arange(1.0, len(q) + 1)) for q in (left, right))
    pool = (torch.randn(matrices.num_matrices, m, n, generator=generator) for _ in range(num_steps))
    return [(left @ x @ right.mT).to(device) for x in pool]


def make_contestant(name: str, matrices: MatrixSet, frequency: int, pool: Sequence[Tensor], **more: Any) -> Contestant:
    """A contestant at step 0; all start from the same parameters. `more` are further options of ours."""
    generator = torch.Generator().manual_seed(1)
    weights = (0.02 * torch.randn(matrices.num_matrices, *matrices.shape, generator=generator)).to(pool[0])
    experts = matrices.experts if name == OURS else 1

    def split(batch: Tensor) -> list[Tensor]:
        return [part.clone() if experts > 1 else part[0].clone() for part in batch.split(experts)]

    params: list[Tensor] = [torch.nn.Parameter(w) for w in split(weights)]
    if name == OURS:
        options = {**RULE, **LATHER_OPTIONS, "matrix_layout": matrices.matrix_layout, **more}
        optimizer: Optimizer = SOAP(params, precondition_frequency=frequency, **options)
    else:
        optimizer = {"heavyball": _heavyball, "pytorch_optimizer": _pytorch_optimizer}[name](params, frequency)
    return Contestant(name, params, optimizer, [split(g) for g in pool])


def _heavyball(params: list[Tensor], frequency: int) -> Optimizer:
    import heavyball
    import heavyball.utils

    heavyball.utils.compile_mode = None  # process-wide, its only switch
    optimizer: Any = heavyball.SOAP(
        params,
        **RULE,
        precondition_frequency=frequency,
        max_precond_dim=NO_LIMIT,
        merge_dims=False,
        use_precond_schedule=False,
        compile_step=False,
    )
    optimizer.consume_grad = False  # otherwise a step sets p.grad to None
    # It adds up 1/f in floating point, which for f = 10 refreshes at steps 11, 20, 30, ...; this adds up whole numbers.
    optimizer.precond_schedule = lambda step: float(step % frequency == 0)
    checked: Optimizer = optimizer
    return checked


def _pytorch_optimizer(params: list[Tensor], frequency: int) -> Optimizer:
    import pytorch_optimizer

    optimizer: Optimizer = pytorch_optimizer.SOAP(
        params, **RULE, precondition_frequency=frequency, max_precondition_dim=NO_LIMIT, merge_dims=False
    )
    return optimizer


def check_installed(peers: Sequence[str]) -> None:
    """Raises UserError, with the command to give, if a peer is missing."""
    missing = [peer for peer in peers if importlib.util.find_spec(peer) is None]
    if missing:
        raise UserError(
            f"lather bench optimizer compares with {' and '.join(missing)}, not installed here: "
            "pip install 'lather[bench]', or give --peers none"
        )
