"""Rules that were tried in search of a better one than Muon; `ideas.toml` compares them,
docs/log.md says what became of them.

Letters as in `lather.optim.rules.muon`: G gradient, B momentum, N numerator, U update; x (B, m, n).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from lather.optim import Entry, Matrix, State
from lather.optim.linalg.kronecker import precondition, update_kronecker_factors
from lather.optim.linalg.newton_schulz import update_scale, with_norm_of
from lather.optim.options import Count, Decay, NonNegative
from lather.optim.rule import column
from lather.optim.rules.muon import MuonRule
from lather.optim.rules.soap_muon import SOAPMuonRule


@dataclass(frozen=True)
class MomentumRamp(MuonRule):
    """Muon with a momentum that grows from `first_momentum` to `momentum`: early gradients turn
    fast, late ones are mostly noise."""

    _: KW_ONLY
    first_momentum: Decay = 0.8
    """mu at the first step."""
    ramp_steps: Count = 200
    """Steps over which 1 / (1 - mu), the momentum's memory, grows evenly to that of `momentum`."""

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        share = min(1.0, t / self.ramp_steps)
        memory = (1 - share) / (1 - self.first_momentum) + share / (1 - self.momentum)
        mu = 1 - 1 / memory
        g = self.decayed(g, s)
        b = s["momentum_buffer"].lerp_(g, 1 - mu)
        return self.finished(g.lerp(b, mu) if self.nesterov else b, s)


@dataclass(frozen=True)
class TwoMomenta(MuonRule):
    """Muon with a fast and a slow momentum together (after AdEMAMix, arXiv:2409.03137): old
    gradients hold signal that one average drops."""

    _: KW_ONLY
    slow_momentum: Decay = 0.98
    """mu of the slow momentum, which is corrected for bias."""
    slow_share: NonNegative = 0.5
    """Weight of the slow momentum against the fast one's numerator."""

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return super().state(matrix) | {"slow_buffer": Entry(matrix.shape, "moment")}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        g = self.decayed(g, s)
        slow = s["slow_buffer"].lerp_(g, 1 - self.slow_momentum) / (1 - self.slow_momentum**t)
        return self.finished(self.numerator(g, s).lerp(slow, self.slow_share), s)


@dataclass(frozen=True)
class MARSMuon(MuonRule):
    """Muon on gradients that are corrected by their change since the last step (arXiv:2411.10438,
    approximate form): less variance in B."""

    _: KW_ONLY
    gamma: NonNegative = 0.025
    """Weight of the correction."""

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return super().state(matrix) | {"last_gradient": Entry(matrix.shape, "moment")}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        g, last = self.decayed(g, s), s["last_gradient"]
        corrected = (
            g if t == 1 else g + self.gamma * self.momentum / (1 - self.momentum) * (g - last)
        )
        last.copy_(g)
        return self.finished(self.numerator(corrected, s), s)


@dataclass(frozen=True)
class SignalMuon(MuonRule):
    """Muon with longer steps where gradients agree: U times |N|_F / (mean |G|_F^2)^(1/2), which is
    near 1 for signal and small for noise.

    An expert that saw few tokens has a noisy gradient, which orthogonalising makes as long as any
    other.
    """

    _: KW_ONLY
    norm_decay: Decay = 0.95
    """Decay rate of the mean of |G|_F^2."""

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return super().state(matrix) | {"square_norm": Entry(())}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        g = self.decayed(g, s)
        square = s["square_norm"].lerp_(g.square().sum((1, 2)), 1 - self.norm_decay) / (
            1 - self.norm_decay**t
        )
        n = self.numerator(g, s) / (1 - self.momentum**t)
        signal = (n.square().sum((1, 2)) / square.clamp_min(1e-30)).clamp_max(1.0)
        return self.finished(n, s) * column(signal.sqrt(), n)


@dataclass(frozen=True)
class AdaMuon(MuonRule):
    """Muon with U divided, element by element, by the root of its second moment, and its norm kept
    (arXiv:2507.11005)."""

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return super().state(matrix) | {"exp_avg_sq": Entry(matrix.shape, "moment")}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        u = self.finished(self.numerator(self.decayed(g, s), s), s)
        v = s["exp_avg_sq"].mul_(self.beta2).addcmul_(u, u, value=1 - self.beta2)
        return with_norm_of(u, u / (v / (1 - self.beta2**t)).sqrt_().add_(1e-8))


@dataclass(frozen=True)
class FactoredSOAPMuon(SOAPMuonRule):
    """SOAP-Muon that keeps only row and column means of its second moment in the bases: m + n
    numbers instead of m n."""

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        m, n = matrix.shape
        return super().state(matrix) | {"row_square": Entry((m,)), "column_square": Entry((n,))}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        g = self.decayed(g, s)
        n = x = self.numerator(g, s)
        beta = 1 - (1 - self.shampoo_beta) / (1 - self.shampoo_beta**t)
        update_kronecker_factors(s.by_dim("factor"), n, beta, s.active)
        if t > self.muon_warmup_steps and (bases := s.by_dim("basis")):
            x = precondition(n, bases, "in")
            square = x.square()
            rows = s["row_square"].lerp_(square.mean(2), 1 - self.beta2)
            columns = s["column_square"].lerp_(square.mean(1), 1 - self.beta2)
            v = (
                rows[:, :, None]
                * columns[:, None, :]
                / rows.mean(1).clamp_min(1e-30)[:, None, None]
            )
            x = precondition(
                with_norm_of(x, x / (v / (1 - self.beta2**t)).sqrt().add(self.eps)), bases, "out"
            )
        return self.finished(x, s)


@dataclass(frozen=True)
class RememberedPolar(MuonRule):
    """U = N (mean of N^T N)^(-1/2) on the smaller side, by a Newton iteration from the last step's
    root, without Newton-Schulz.

    That root Z is nearly right, so one or two iterations Z <- Z (3 I - A Z^2) / 2 are enough while
    A changes slowly. The mean gives the polar factor a memory.
    """

    _: KW_ONLY
    memory: Decay = 0.5
    """Decay rate of the mean of N^T N; with 0 it is this step's N alone."""
    damping: NonNegative = 1e-3
    """A number added to A's diagonal, relative to A's mean eigenvalue."""
    iterations: Count = 2
    """Newton iterations in a step."""

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        k = min(matrix.shape)
        return super().state(matrix) | {"gram": Entry((k, k)), "root": Entry((k, k))}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        n = self.numerator(self.decayed(g, s), s)
        x = n if n.shape[1] <= n.shape[2] else n.mT
        gram = x @ x.mT
        a = s["gram"].lerp_(gram, 1.0 if t == 1 else 1 - self.memory)
        k = a.shape[-1]
        mean = a.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)[:, None, None]
        a = a + self.damping * mean * torch.eye(k)
        z = s["root"]
        if t == 1:
            w, q = torch.linalg.eigh(a)
            z.copy_(q * w.clamp_min(1e-30).rsqrt()[:, None, :] @ q.mT)
        for _ in range(self.iterations):
            az = a @ z
            largest = (
                torch.linalg.matrix_norm(z @ az, ord=2, keepdim=True) if k <= 8 else _largest(z, az)
            )
            z = z / (largest / 1.5).clamp_min(1.0).sqrt()
            z = 1.5 * z - 0.5 * z @ (z @ (a @ z))
            z = (z + z.mT) / 2
        s["root"].copy_(z)
        u = z @ x
        return (u if n.shape[1] <= n.shape[2] else u.mT) * update_scale(n.shape[1:], self.scale)


def _largest(z: Tensor, az: Tensor) -> Tensor:
    """Bound the spectral norm of Z A Z from above by the root of the Frobenius norm of its square,
    which is cheap."""
    zaz = z @ az
    norm: Tensor = torch.linalg.matrix_norm(zaz @ zaz, keepdim=True)
    return norm.sqrt()
