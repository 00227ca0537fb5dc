"""Edges of the engine, each of which failed once."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lather.optim import (
    KLSOAP,
    SOAP,
    AdamW,
    Entry,
    Matrix,
    MatrixOptimizer,
    Muon,
    RefreshingRule,
    Rule,
    State,
)
from lather.optim.functional import orthogonalize
from lather.optim.rules.adamw import AdamWRule
from lather.optim.rules.soap import SOAPRule


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(
        torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    )


def steps(optimizer: torch.optim.Optimizer, num: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("steps_taken", [5, 8, 12])
@pytest.mark.parametrize("rank", [1, 2, 16])
def test_polar_express_stays_bounded_in_bf16(rank: int, steps_taken: int) -> None:
    """The gradient of an expert with one token has rank one."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 32, rank, generator=generator) @ torch.randn(
        8, rank, 48, generator=generator
    )
    u = orthogonalize(x, steps_taken, "polar_express", "bfloat16")
    largest = torch.linalg.matrix_norm(u, ord=2)
    assert float(largest.max()) < 1.3
    assert float(largest.min()) > 0.7


def test_parameters_may_be_given_by_name() -> None:
    p = parameter(3, 3)
    assert SOAP(params=[p], lr=1e-2).param_groups[0]["params"] == [p]


class Counted(RefreshingRule):
    """A rule that keeps a root for each dim, which a refresh replaces by the root that `by_dim`
    finds, plus 1."""

    def dims(self, matrix: Matrix) -> tuple[int, ...]:
        return (0, 1) if matrix.is_matrix else ()

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        roots = {
            f"root_{dim}": Entry((matrix.shape[dim],), "basis", 1.0) for dim in self.dims(matrix)
        }
        return {**roots, "root_extra_0": Entry(())}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        return g

    def refresh(self, s: State, dim: int, method: str, first: bool) -> None:
        found = s.by_dim("root")
        assert sorted(found) == [0, 1]
        s[f"root_{dim}"] = found[dim] + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num", [1, 3])
def test_what_a_refresh_replaces_is_kept(dtype: torch.dtype, num: int) -> None:
    params = [parameter(3, 4) for _ in range(num)]
    optimizer = MatrixOptimizer(params, Counted(1e-2, state_dtype=dtype))
    steps(optimizer, 3)
    assert all(
        bool((optimizer.state[p][f"root_{dim}"] == 4).all()) for p in params for dim in (0, 1)
    )


def test_a_saved_step_may_be_a_number() -> None:
    p = parameter(3, 4)
    optimizer = SOAP([p], precondition_frequency=2)
    steps(optimizer, 3)
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = 3.0
    other = SOAP([parameter(3, 4)], precondition_frequency=2)
    other.load_state_dict(saved)
    steps(other, 1)
    assert int(next(iter(other.state.values()))["step"]) == 4
    optimizer.state[p]["step"] = 7
    steps(optimizer, 1)
    assert int(optimizer.state[p]["step"]) == 8


def test_groups_of_another_optimizer_are_taken() -> None:
    p, q = parameter(3, 4), parameter(5)
    first = SOAP([{"params": [p]}, {"params": [q], "rule": "adamw"}])
    assert [group["rule"] for group in SOAP(first.param_groups).param_groups] == ["soap", "adamw"]
    assert SOAP(torch.optim.AdamW([p, q]).param_groups).param_groups[0]["rule"] == "soap"
    with pytest.warns(UserWarning, match="kept and ignored: betas, eps$"):
        steps(Muon(torch.optim.AdamW([p, q]).param_groups), 1)


@pytest.mark.parametrize("cls", [SOAP, KLSOAP])
def test_clipping_does_not_change_what_the_rest_inherits(cls: Any) -> None:
    found = []
    for options in ({}, {"max_update_rms": 0.1}):
        optimizer = cls(
            [{"params": [parameter(3)], "rule": "adamw"}], lr=1e-2, betas=(0.8, 0.85), **options
        )
        found.append(optimizer.param_groups[0]["betas"])
    assert found == [(0.8, 0.85)] * 2


@dataclass(frozen=True)
class TwoDecays(Rule):
    """AdamW without decay on vectors."""

    weight_decay: float = 0.5

    def on(self, matrix: Matrix) -> Rule:
        return self.turned_into(
            AdamWRule, weight_decay=0.0 if matrix.num_dims < 2 else self.weight_decay
        )


def test_a_rule_may_have_other_options_for_some_parameters() -> None:
    vector, matrix = parameter(6), parameter(3, 4)
    twin = torch.nn.Parameter(matrix.detach().clone())
    both = MatrixOptimizer([vector, matrix], TwoDecays(1e-2))
    one = AdamW([twin], lr=1e-2, weight_decay=0.5)
    for p in (vector, matrix):
        p.grad = torch.ones_like(p)
    twin.grad = torch.ones_like(twin)
    both.step()
    one.step()
    assert torch.equal(matrix, twin)


@dataclass(frozen=True)
class Sign(Rule):
    """Steps by the sign of an average, element by element; its entry is of the default kind."""

    elementwise: ClassVar[bool] = True

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return {"average": Entry(matrix.shape)}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        return s["average"].lerp_(g, 0.5).sign()


def test_an_elementwise_rule_may_have_any_kind_of_entry() -> None:
    params = [parameter(4, 5), parameter(3)]
    optimizer = MatrixOptimizer(params, Sign(1e-2))
    steps(optimizer, 2)
    assert [optimizer.state[p]["average"].shape for p in params] == [p.shape for p in params]


def test_a_rule_that_is_put_into_a_group_later_is_refused_with_the_remedy() -> None:
    optimizer = SOAP([parameter(3, 4)])
    steps(optimizer, 1)
    optimizer.param_groups[0]["rule"] = "muon"
    with pytest.raises(
        ValueError, match=r"rule 'muon' of a parameter group was set after.*add_param_group"
    ):
        steps(optimizer, 1)


def test_second_moments_of_rows_may_decay_slowly_under_bf16_state() -> None:
    Muon([parameter(3, 4)], normalize="row", beta2=0.999, state_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="betas"):
        MatrixOptimizer([parameter(3, 4)], SOAPRule(betas=(0.9, 0.999), state_dtype=torch.bfloat16))
