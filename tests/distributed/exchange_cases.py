"""Cases of an exchange: the tokens and where they go; and loops over tokens that find what every
rank then has to have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lather.models.balance import count_rows
from lather.models.routing import Routing
from models.tiny import random_normal


@dataclass(frozen=True)
class Case:
    """The tokens of each rank of a group, and the experts that they go to."""

    tokens: tuple[int, ...]
    """The number of tokens of each rank; its length is the number of ranks."""
    e: int = 8
    k: int = 2
    d: int = 5
    experts: tuple[int, ...] | None = None
    """The experts that tokens may go to; None: all."""
    dtype: torch.dtype = torch.float64
    weights: torch.dtype = torch.float64
    seed: int = 0

    def x(self, rank: int) -> Tensor:
        return self.table(rank, self.d, seed=1).to(self.dtype)

    def table(self, rank: int, columns: int, *, seed: int) -> Tensor:
        return random_normal(self.tokens[rank], columns, seed=self.seed + 100 * seed + rank)

    def routing(self, rank: int) -> Routing:
        generator = torch.Generator().manual_seed(self.seed + rank)
        allowed = torch.tensor(range(self.e) if self.experts is None else self.experts)
        scores = torch.rand(self.tokens[rank], len(allowed), generator=generator)
        experts_TK = allowed[scores.argsort(1)[:, : self.k]]
        weights_TK = self.table(rank, self.k, seed=2).to(self.weights)
        return Routing(
            experts_TK, weights_TK, count_rows(experts_TK, self.e), torch.zeros(()), None
        )

    def rows(self, source: int, target: int) -> list[int]:
        """The tokens of rank `source` that rank `target` has to receive."""
        n = self.e // len(self.tokens)
        return [
            t
            for t, experts in enumerate(self.routing(source).experts_TK.tolist())
            if any(expert // n == target for expert in experts)
        ]


TWO = {
    "mixed": Case((13, 7)),
    "63 columns, one token": Case((1, 4), d=63),
    "a rank without tokens": Case((0, 9)),
    "the other rank without tokens": Case((9, 0)),
    "no tokens at all": Case((0, 0)),
    "a single row": Case((1, 0), k=1),
    "everything to rank 0": Case((5, 8), experts=(0, 2, 3)),
    "everything to rank 1": Case((5, 8), experts=(4, 5, 7)),
    "idle experts on both": Case((5, 8), experts=(1, 6)),
    "one expert has everything": Case((6, 3), k=1, experts=(5,)),
    "K = 1": Case((6, 3), k=1),
    "K = E": Case((4, 3), e=6, k=6),
    "one expert per rank": Case((4, 3), e=2, k=1),
    "fp32": Case((13, 7), dtype=torch.float32, weights=torch.float32),
    "bf16": Case((13, 7), dtype=torch.bfloat16, weights=torch.float32),
    "bf16 and weights as well": Case((13, 7), dtype=torch.bfloat16, weights=torch.bfloat16),
    "wide weights": Case((13, 7), dtype=torch.float32, weights=torch.float64),
}
FOUR = {
    "mixed": Case((5, 0, 63, 1), k=5, e=12),
    "bf16": Case((9, 8, 7, 0), k=8, dtype=torch.bfloat16, weights=torch.float32),
    "everything to rank 2": Case((3, 2, 0, 1), experts=(4, 5)),
    "nothing to rank 1": Case((3, 2, 5, 1), experts=(0, 1, 4, 6, 7), k=3),
}
PAIRS = {name: TWO[name] for name in ("mixed", "a rank without tokens")}
"""Cases for groups whose ranks have other numbers than in the world."""


def random_case(seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    first, second, half, k = (
        int(torch.randint(high, (), generator=generator)) for high in (9, 9, 5, 64)
    )
    e = 2 * (half + 1)
    return Case((first, second), e=e, k=1 + k % e, seed=1000 * seed)


def expected_dispatch(case: Case, me: int) -> tuple[Tensor, Tensor, Tensor]:
    n, x, experts, weights = case.e // len(case.tokens), [], [], []
    for source in range(len(case.tokens)):
        routing = case.routing(source)
        for t in case.rows(source, me):
            x.append(case.x(source)[t])
            local = [
                (e - me * n if e // n == me else -1, w)
                for e, w in zip(routing.experts_TK[t].tolist(), routing.weights_TK[t], strict=True)
            ]
            experts.append(torch.tensor([e for e, _ in local]))
            weights.append(torch.stack([w if e >= 0 else torch.zeros_like(w) for e, w in local]))
    return (
        stacked(x, case.d, case.dtype),
        stacked(experts, case.k, torch.int64),
        stacked(weights, case.k, case.weights),
    )


def stacked(rows: list[Tensor], columns: int, dtype: torch.dtype) -> Tensor:
    return torch.stack(rows) if rows else torch.empty(0, columns, dtype=dtype)


def from_tables(case: Case, me: int, columns: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """The rows that rank `me` sends back, row by row; `tables(...)` has the same rows where they
    have to arrive."""
    rows = [
        tables(case, source, me, columns, dtype, seed)[t]
        for source in range(len(case.tokens))
        for t in case.rows(source, me)
    ]
    return stacked(rows, columns, dtype)


def tables(
    case: Case, source: int, target: int, columns: int, dtype: torch.dtype, seed: int
) -> Tensor:
    return case.table(source, columns, seed=10 * seed + target).to(dtype)


def expected_sum(case: Case, me: int, *, seed: int) -> Tensor:
    """The sum that a combine has to give, added slot by slot in fp32 or wider, and not rounded
    yet."""
    n, wide = case.e // len(case.tokens), torch.promote_types(case.dtype, torch.float32)
    total = torch.zeros(case.tokens[me], case.d, dtype=wide)
    for t, experts in enumerate(case.routing(me).experts_TK.tolist()):
        for rank in dict.fromkeys(expert // n for expert in experts):
            total[t] += tables(case, me, rank, case.d, case.dtype, seed)[t].to(wide)
    return total


def expected_weights_gradient(case: Case, me: int) -> Tensor:
    n, grad = case.e // len(case.tokens), torch.empty(case.tokens[me], case.k, dtype=case.weights)
    for t, experts in enumerate(case.routing(me).experts_TK.tolist()):
        for k, expert in enumerate(experts):
            grad[t, k] = tables(case, me, expert // n, case.k, case.weights, 5)[t, k]
    return grad
