"""Two rules written from public names alone, as somebody outside of the package would do it."""

from dataclasses import dataclass

import torch

from lather.optim import Entry, Matrix, RefreshingRule, Rule, State
from lather.optim.functional import precondition, update_kronecker_factors


@dataclass(frozen=True)
class Lion(Rule):
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return {"exp_avg": Entry(matrix.shape, "moment")}

    def update(self, g: torch.Tensor, s: State, t: int) -> torch.Tensor:
        g = self.decayed(g, s)
        u = torch.lerp(g, s["exp_avg"], self.betas[0]).sign()
        s["exp_avg"].lerp_(g, 1 - self.betas[1])
        return u


@dataclass(frozen=True)
class Shampoo(RefreshingRule):
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    refreshes_first = True

    def dims(self, matrix: Matrix) -> tuple[int, ...]:
        return (0, 1) if matrix.is_matrix else ()

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        sizes = {i: (matrix.shape[i],) * 2 for i in self.dims(matrix)}
        factors = {f"factor_{i}": Entry(size) for i, size in sizes.items()}
        roots = {f"root_{i}": Entry(size, "basis", None) for i, size in sizes.items()}
        return {"exp_avg": Entry(matrix.shape, "moment")} | factors | roots

    def statistics(self, g: torch.Tensor, s: State, t: int) -> None:
        update_kronecker_factors(s.by_dim("factor"), g, self.betas[1], s.active)

    def refresh(self, s: State, dim: int, method: str, first: bool) -> None:
        w, q = torch.linalg.eigh(s[f"factor_{dim}"])  # L = Q diag(w) Q^T
        # not pow, whose bits on a CPU depend on the size of the batch
        root = (w + 1e-4 * w[:, -1:]).clamp_min(1e-30).rsqrt().sqrt()
        s[f"root_{dim}"].copy_(q * root[:, None] @ q.mT)

    def update(self, g: torch.Tensor, s: State, t: int) -> torch.Tensor:
        m = s["exp_avg"].lerp_(self.decayed(g, s), 1 - self.betas[0])  # no refresh turns it
        u = precondition(m, s.by_dim("root"), "in")  # L^-1/4 M R^-1/4
        rms = u.reshape(len(u), -1).square().mean(1).sqrt()
        return u / rms.add(1e-30).view(-1, *[1] * (u.dim() - 1))
