"""Experts stacked in 3-D parameters: each preconditioned on its own, or all as one merged matrix.

    python examples/experts_3d.py        (seconds on a CPU)

A mixture-of-experts layer keeps its experts' weights as (experts, in, out), as most MoE code does.
`parameter_groups` recognizes them by their name and asks for `matrix_layout="per_expert"`: factors
(experts, in, in) and (experts, out, out), so that no expert sees another. StackedSOAP with
`matrix_layout="stacked"` merges them along their smaller edge and keeps one pair of factors. A
group may also name its rule: "mixed" runs SOAP-Muon on the experts, Muon on the other matrices and
AdamW on the rest, in one optimizer. For comparison: AdamW on everything. Printed for each: the
loss, and the bytes of optimizer state in all and of the experts' first matrices as `state_bytes`
predicts them.

The rates are two to five times those that docs/optimizers.md recommends, because with these the toy
does not get far in its 100 steps. The toy experts are so few and small that stacking saves next to
nothing, or even costs; docs/optimizers-reference.md has the numbers for real sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lather.optim import (
    SOAP,
    AdamW,
    MatrixOptimizer,
    Muon,
    SOAPMuon,
    StackedSOAP,
    parameter_groups,
    parameters_by_kind,
    state_bytes,
)

WIDTH, HIDDEN, EXPERTS, TOP_K, STEPS = 32, 48, 8, 2, 100


class Experts(nn.Module):
    """The gated sum of the TOP_K experts of each token: x (T, WIDTH) -> (T, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        hidden = torch.einsum(
            "td,edh->teh", x, self.up
        ).relu()  # every expert sees every token: simple, not fast
        return torch.einsum("teh,ehd,te->td", hidden, self.down, gate)


class MoE(nn.Module):
    """Router, experts, and a linear read-out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.norm = nn.LayerNorm(WIDTH)
        self.readout = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(TOP_K)
        gate = torch.zeros(len(x), EXPERTS).scatter(1, chosen, weight)
        y: Tensor = self.readout(self.norm(x + self.experts(x, gate)))
        return y


def make_optimizer(name: str, model: nn.Module) -> MatrixOptimizer:
    if name == "per_expert":
        return SOAP(
            parameter_groups(model), lr=1e-2, second_moment="rotate", precondition_frequency=1
        )
    if name == "stacked":
        return StackedSOAP(parameter_groups(model, expert_layout="stacked"), lr=1e-2)
    if name == "mixed":
        kinds = parameters_by_kind(model)
        experts = {"params": kinds["experts"], "rule": "soap_muon", "matrix_layout": "per_expert"}
        return Muon(
            [{"params": kinds["matrices"]}, experts, {"params": kinds["rest"], "rule": "adamw"}],
            lr=2e-2,
        )
    return AdamW(model.parameters(), lr=1e-2)


def batch(step: int, tokens: int = 256) -> tuple[Tensor, Tensor]:
    """Draw tokens around eight centres, and rotate them differently for each center."""
    fixed = torch.Generator().manual_seed(0)
    centres = torch.randn(8, WIDTH, generator=fixed)
    rotations = torch.linalg.qr(torch.randn(8, WIDTH, WIDTH, generator=fixed)).Q
    fresh = torch.Generator().manual_seed(step + 1)
    kind = torch.randint(8, (tokens,), generator=fresh)
    x = centres[kind] + torch.randn(tokens, WIDTH, generator=fresh)
    return x, torch.einsum("td,tdh->th", x, rotations[kind])


def main() -> None:
    shape = (EXPERTS, WIDTH, HIDDEN)
    predicted = {
        "per_expert": state_bytes(shape, SOAP, matrix_layout="per_expert"),
        "stacked": state_bytes(shape, StackedSOAP),
        "mixed": state_bytes(shape, SOAPMuon, matrix_layout="per_expert"),
        "adamw": state_bytes(shape, AdamW),
    }
    for name, size in predicted.items():
        torch.manual_seed(0)
        model = MoE()
        optimizer = make_optimizer(name, model)
        losses = []
        for step in range(STEPS):
            x, target = batch(step)
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        kept = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
        up = sum(x.nbytes for x in optimizer.state[model.experts.up].values())
        assert up == size
        print(
            f"{name:10}  loss {losses[0]:.3f} -> {losses[-1]:.3f}   state {kept:,} bytes, of "
            f"experts.up {up:,} (predicted {size:,})"
        )


if __name__ == "__main__":
    main()
