"""Checks that hold for every rule: the same numbers after a resume, one matrix at a time, and
expert by expert; and that entries of the state are what their kinds say."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from lather.optim import Entry, Matrix, MatrixOptimizer, RefreshingRule, Rule, State

SHAPES = [(6, 4), (6, 4), (3, 4, 5), (5,)]


def trained(
    rule: Rule, shapes: Sequence[tuple[int, ...]] = SHAPES, resume_at: int = -1
) -> list[Tensor]:
    """Parameters of these shapes after 12 steps."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = MatrixOptimizer(params, rule)
    for step in range(12):
        if step == resume_at:
            saved = optimizer.state_dict()
            optimizer = MatrixOptimizer(params, rule)
            optimizer.load_state_dict(saved)
        sizes = [p.numel() for p in params]
        noise = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(step))
        for p, part in zip(params, noise.split(sizes), strict=True):
            p.grad = part.view(p.shape).clone()
        optimizer.step()
    return [p.detach() for p in params]


def watched(rule: Rule) -> Rule:
    """Return the rule with checks of its phases: factors are symmetric, and only `refresh` changes
    bases."""
    cls, kinds = type(rule), dict[str, str]()

    def state(self: Rule, matrix: Matrix) -> dict[str, Entry]:
        entries = cls.state(self, matrix)
        kinds.update((name, entry.kind) for name, entry in entries.items())
        return entries

    def phase(name: str) -> Callable[..., Any]:
        method = getattr(cls, name)

        def call(self: Rule, *arguments: Any) -> Any:
            s = next(x for x in arguments if isinstance(x, State))
            bases = {key: s[key].clone() for key in s if kinds.get(key) == "basis"}
            answer = method(self, *arguments)
            for key, before in bases.items():
                if name != "refresh":
                    text = f"{name} changes {key}: it is a statistic, not a basis"
                    assert torch.equal(s[key], before), text
            for key in s:
                if kinds.get(key) == "factor":
                    text = f"after {name}, {key} is not symmetric: it is a statistic, not a factor"
                    torch.testing.assert_close(s[key], s[key].mT, msg=text)
                    roots = s[key].diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
                    bound = roots.unsqueeze(-1) * roots.unsqueeze(-2) * (1 + 1e-4) + 1e-30
                    text = f"after {name}, {key} is not positive semidefinite: a statistic"
                    assert (s[key].abs() <= bound).all(), text
            return answer

        return call

    phases = ("statistics", "update", "refresh") if isinstance(rule, RefreshingRule) else ()
    methods = {name: phase(name) for name in phases or ("update",)}
    watching = type(cls.__name__, (cls,), {"state": state, **methods})
    return watching(**{field.name: getattr(rule, field.name) for field in fields(rule)})


def check(rule: Rule) -> None:
    whole = trained(watched(rule))
    for one, other in zip(whole, trained(rule, resume_at=7), strict=True):
        assert torch.equal(one, other), "state is kept outside of `s`, or depends on more than t"
    for one, other in zip(whole, trained(replace(rule, batched=False)), strict=True):
        torch.testing.assert_close(one, other, msg="a matrix depends on those of its batch")
    experts = trained(replace(rule, matrix_layout="per_expert"), [(3, 4, 5)])[0]
    for one, other in zip(experts, trained(rule, [(4, 5)] * 3), strict=True):
        torch.testing.assert_close(one, other, msg="an expert depends on the others")
