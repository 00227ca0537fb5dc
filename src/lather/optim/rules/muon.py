"""Muon (Jordan et al., 2024) and NorMuon (arXiv:2510.05491).

Letters: B momentum, N the Nesterov combination of B and the gradient, U update. The state is B
alone, and with NorMuon one number per row.

With `slow_momentum_start` the momentum becomes M = (1 - share) B + share S, of a fast average B and
a slow average S that both begin as the one average so far, so that nothing jumps. The state has S
as the difference D = S - B: where it is missing or zero, both averages are equal. The published
numbers, 0.4385 of 0.85 and 0.5615 of 0.98, have a mean age of 0.4385 * 0.85 / 0.15 + 0.5615 * 0.98
/ 0.02 = 30 steps; that of 0.95 alone is 19. No average is corrected for its bias: Newton-Schulz
takes no notice of a factor, and S begins with the weight that B has."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from lather.device import is_gpu
from lather.kernels.momentum import nesterov_, unit_nesterov_
from lather.optim.linalg.newton_schulz import (
    Coefficients,
    iterate_unit,
    iteration_dtype,
    orthogonalize,
    update_scale,
    with_norm_of,
)
from lather.optim.options import (
    Count,
    Decay,
    Fraction,
    NonNegative,
    Range,
    Rate,
    Scale,
    Steps,
)
from lather.optim.rule import Entry, Matrix, Rule, State
from lather.optim.rules.adamw import AdamWRule

GAP = "momentum_gap"
"""Name of the entry D, the slow average less the fast one."""


@dataclass(frozen=True)
class MuonRule(Rule):
    """Momentum, orthogonalized by Newton-Schulz; vectors take AdamW's step at the same learning
    rate."""

    lr: Rate = 1e-2
    """Learning rate."""
    momentum: Decay = 0.95
    """Decay rate mu of the momentum B, up to step `slow_momentum_start` if that is set."""
    weight_decay: NonNegative = 0.01
    """Weight decay, wd in `weight_decay_method`."""
    _: KW_ONLY
    nesterov: bool = True
    """Use Nesterov momentum: orthogonalize mu B + (1 - mu) G instead of B, or what a mixture of
    two momenta would be after one more step with the same gradient."""
    slow_momentum_start: Steps = 0
    """Step after which the momentum is a mixture of a fast and a slow average, which both start
    from the one average so far; 0: never. Published is 0.3 of the run. From the first steps on, the
    mixture does harm."""
    fast_momentum: Decay = 0.85
    """Decay rate of the fast average after step `slow_momentum_start`."""
    slow_momentum: Decay = 0.98
    """Decay rate of the slow average after step `slow_momentum_start`. The mean age of the
    mixture, 30 steps by default, belongs to the length of the run: published for 3,250 steps."""
    slow_share: Fraction = 0.5615
    """Share of the slow average in the mixture."""
    steps: Count = 5
    """Steps of the Newton-Schulz iteration. In no measured run did 3 steps raise the loss."""
    coefficients: Coefficients = "quintic"
    """Coefficients of the Newton-Schulz iteration. quintic: Jordan's, the same at every step;
    polar_express: a sequence that changes from step to step; cubic: two products a step in place of
    three, but it needs more steps; hybrid: quintic, but for the last two steps, which move singular
    values to 1 more exactly (published with 10 steps)."""
    scale: Scale = "match_rms_adamw"
    """Factor by which the orthogonalized update is multiplied. match_rms_adamw: 0.2 sqrt(max(m,
    n)), which gives the update about the rms of AdamW's; spectral: sqrt(max(1, m / n)); or a
    number."""
    newton_schulz_dtype: Literal["auto", "fastest", "float32", "bfloat16"] = "auto"
    """dtype of the Newton-Schulz iteration. auto: that of all other arithmetic, but bfloat16 for
    float32 on CUDA; fastest: bfloat16 also for float32 on a CPU that multiplies it faster (AMX, or
    AMD with AVX512-BF16)."""
    normalize: Annotated[str | None, Range("'row' or None", (None, "row").__contains__)] = None
    """row: divide each row of U by the root of that row's second moment and restore the norm of U
    (NorMuon); None: leave U as it is."""
    beta2: Decay = 0.95
    """Decay rate of the second moments: of rows (NorMuon), and of V in SOAP-Muon."""

    name: ClassVar[str] = "muon"
    moment_decays: ClassVar[tuple[str, ...]] = ("momentum", "fast_momentum", "slow_momentum")
    optional_entries: ClassVar[tuple[str, ...]] = (GAP,)

    def on(self, matrix: Matrix) -> Rule:
        return self if matrix.is_matrix else self.on_vectors()

    def on_vectors(self) -> AdamWRule:
        return self.turned_into(AdamWRule, nesterov=False)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        moment = Entry(matrix.shape, "moment")
        return (
            {"momentum_buffer": moment}
            | ({GAP: moment} if self.slow_momentum_start else {})
            | ({"row_moment": Entry(matrix.shape[:1])} if self.normalize else {})
        )

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        g = self.decayed(g, s)
        if not (is_gpu(g) and self._is_plain):
            return self.finished(self.numerator(g, s, t), s)
        dtype = iteration_dtype(g, self.newton_schulz_dtype)
        b, factor = s["momentum_buffer"], s.gradient_factor
        y = unit_nesterov_(b, g, self.momentum, dtype, factor)
        return iterate_unit(y, self.steps, self.coefficients, update_scale(g.shape[1:], self.scale))

    @property
    def _is_plain(self) -> bool:
        """Whether U depends on nothing but N / |N|, without a mixture of momenta."""
        return type(self) is MuonRule and self._is_one_momentum and not self.normalize

    @property
    def _is_one_momentum(self) -> bool:
        """Whether N is that of one momentum, `nesterov_`."""
        return self.nesterov and not self.slow_momentum_start

    @property
    def takes_factor(self) -> bool:
        is_read_once = self._is_one_momentum and not self.couples_decay
        return is_read_once and self._has_methods_of(MuonRule)

    def _has_methods_of(self, rule: type[MuonRule]) -> bool:
        """Whether those that read G are the rule's: a subclass may read it elsewhere."""
        names = "decayed", "statistics", "update", "numerator"
        return all(getattr(type(self), name, None) is getattr(rule, name, None) for name in names)

    def numerator(self, g: Tensor, s: State, t: int) -> Tensor:
        """Update B = mu B + (1 - mu) G in place and return N = mu B + (1 - mu) G, or B without
        Nesterov momentum; after step `slow_momentum_start` the same of the mixture."""
        if 0 < self.slow_momentum_start < t:
            return self._mixture(g, s)
        if t <= self.slow_momentum_start:
            s[GAP].zero_()  # whatever earlier options have left
        b = s["momentum_buffer"]
        if self.nesterov:
            return nesterov_(b, g, self.momentum, s.gradient_factor)
        return b.lerp_(g, 1 - self.momentum)

    def _mixture(self, g: Tensor, s: State) -> Tensor:
        """Update B = f B + (1 - f) G and D = S - B, with S = c S + (1 - c) G, in place. Return B +
        share D, or what this would be after one more step with the same gradient."""
        b, d, share = s["momentum_buffer"], s[GAP], self.slow_share
        apart = self.slow_momentum - self.fast_momentum
        d.mul_(self.slow_momentum).add_(b - g, alpha=apart)
        b.lerp_(g, 1 - self.fast_momentum)
        if not self.nesterov:
            return b.add(d, alpha=share)
        ahead = g.lerp(b, self.fast_momentum + share * apart)
        return ahead.add_(d, alpha=share * self.slow_momentum)

    def finished(self, x: Tensor, s: State) -> Tensor:
        """Return U for x (B, m, n): orthogonalized, with normalized rows if `normalize` says so,
        and scaled; on a GPU without `normalize` in the dtype of the iteration."""
        scale = update_scale(x.shape[1:], self.scale)
        of_result = 1.0 if self.normalize else scale
        options = (self.steps, self.coefficients, self.newton_schulz_dtype, of_result)
        u = orthogonalize(x, *options, narrow=not self.normalize)
        if not self.normalize:
            return u
        v = s["row_moment"].lerp_(u.square().mean(-1), 1 - self.beta2)
        return with_norm_of(u, u / (v.sqrt() + 1e-8).unsqueeze(-1)).mul_(scale)
