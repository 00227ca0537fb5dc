"""Rules from outside of the package: the rules of `strangers` do what they say and need nothing but
public names, and the engine allows a rule what the contract says.

The common tests (layouts, batching, state dict and bits after resume, errors, copies, memory) have
them among their kinds, and tests/distributed runs them on every mesh.
"""

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import strangers
import torch
from comparison import TOLERANCE, gradients, largest, starting_points
from optim_helpers import Run, all_same, assert_same, parameters, run_both, run_of, same
from strangers import Lion, Shampoo
from test_mistakes import OwnLion
from torch import Tensor

from lather.optim import AdamW, Entry, Matrix, MatrixOptimizer, RefreshingRule, Rule, State
from lather.optim.rules.adamw import AdamWRule

SHAPES = [(6, 6), (5, 8), (8, 5), (7,)]
STEPS = 12


def of_rule(rule: Rule, shapes: Any) -> Run:
    params = parameters(shapes)
    return Run(MatrixOptimizer(params, rule), params)


def test_they_take_forty_lines_and_public_names() -> None:
    source = Path(inspect.getfile(strangers)).read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= 40
    imports = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.ImportFrom | ast.Import)]
    modules = {x.module if isinstance(x, ast.ImportFrom) else x.names[0].name for x in imports}
    assert modules <= {"dataclasses", "torch", "lather.optim", "lather.optim.functional"}
    assert not [name for x in imports for name in x.names if name.name.startswith("_")]


# --- against direct formulas ----------------------------------------------------------------------

Arrays = dict[str, Any]


def lion(
    w: Any, g: Any, s: Arrays, t: int, lr: float, wd: float, betas: tuple[float, float]
) -> Any:
    m = s.setdefault("m", np.zeros_like(w))
    u = np.sign(betas[0] * m + (1 - betas[0]) * g)
    s["m"] = betas[1] * m + (1 - betas[1]) * g
    return (1 - lr * wd) * w - lr * u


def root_of(k: Any) -> Any:
    """Compute the inverse fourth root of k, damped."""
    values, q = np.linalg.eigh(k)
    return q @ np.diag((values + 1e-4 * values[-1]) ** -0.25) @ q.T


def shampoo(
    w: Any, g: Any, s: Arrays, t: int, lr: float, wd: float, betas: tuple[float, float]
) -> Any:
    """Apply the formula; roots are renewed at the first step and at every third."""
    if w.ndim == 2:
        s["L"] = betas[1] * s.get("L", 0) + (1 - betas[1]) * g @ g.T
        s["R"] = betas[1] * s.get("R", 0) + (1 - betas[1]) * g.T @ g
        if t == 1 or t % 3 == 0:
            s["roots"] = root_of(s["L"]), root_of(s["R"])
    s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
    u = s["roots"][0] @ s["m"] @ s["roots"][1] if w.ndim == 2 else s["m"]
    return (1 - lr * wd) * w - lr * u / np.sqrt(np.mean(u * u))


FORMULAS: dict[str, tuple[type[Rule], Any, dict[str, Any]]] = {
    "lion": (Lion, lion, {}),
    "shampoo": (Shampoo, shampoo, {"precondition_frequency": 3}),
}


def distance(name: str, **ours: Any) -> float:
    """The distance from the formula after twelve steps in fp64, in units of lr."""
    cls, formula, preset = FORMULAS[name]
    lr, wd, betas = 1e-2, 0.1, (0.9, 0.8)
    given = {"lr": lr, "weight_decay": wd, "betas": betas, "state_dtype": torch.float64}
    expected, states = starting_points(SHAPES), [{} for _ in SHAPES]
    params = [torch.nn.Parameter(torch.tensor(w)) for w in expected]
    optimizer = MatrixOptimizer(params, cls(**{**given, **preset, **ours}))
    for t, grads in enumerate(gradients(SHAPES, STEPS, missing=()), 1):
        for i, g in enumerate(grads):
            params[i].grad = torch.tensor(g)
            expected[i] = formula(expected[i], g, states[i], t, lr, wd, betas)
        optimizer.step()
    return max(largest(p.detach().numpy() - w) for p, w in zip(params, expected, strict=True)) / lr


@pytest.mark.parametrize("name", FORMULAS)
def test_they_do_what_their_formulas_say(name: str) -> None:
    assert distance(name) < TOLERANCE
    wrong: list[dict[str, Any]] = [
        *({"lr": 1.01e-2}, {"weight_decay": 0.101}, {"weight_decay_method": "l2"})
    ]
    if name == "shampoo":
        wrong += [{"betas": (0.909, 0.8)}, {"betas": (0.9, 0.808)}, {"precondition_frequency": 4}]
    for ours in wrong:
        assert distance(name, **ours) > 100 * TOLERANCE


def test_a_momentum_in_parameter_space_is_not_turned_by_a_refresh() -> None:
    often, never = (of_rule(Shampoo(1e-2, precondition_frequency=f), [(6, 4)]) for f in (1, 100))
    run_both(often, never, range(5))
    assert [one.optimizer.counters["refreshes_done"] for one in (often, never)] == [10, 2]
    assert same(often.state(0)["exp_avg"], never.state(0)["exp_avg"])
    assert not same(often.state(0)["root_0"], never.state(0)["root_0"])


# --- what the engine does for any rule ------------------------------------------------------------


@dataclass(frozen=True)
class LionOnElements(Lion):
    elementwise = True


def test_an_elementwise_rule_has_the_same_bits_with_all_shapes_in_one_batch() -> None:
    shapes = [(6, 4), (3, 4, 5), (5,), (), (0, 3)]
    a = of_rule(Lion(1e-2, weight_decay=0.1), shapes)
    b = of_rule(LionOnElements(1e-2, weight_decay=0.1), shapes)
    run_both(a, b, range(5))
    assert_same(a, b)
    assert len({b.state(i)["exp_avg"].untyped_storage().data_ptr() for i in range(4)}) == 1


@dataclass(frozen=True)
class LateShampoo(Shampoo):
    refreshes_first = False


def test_a_refresh_beside_the_next_step_is_one_after_the_update() -> None:
    options: Any = {"precondition_frequency": 2, "matrix_layout": "per_expert"}
    a = of_rule(LateShampoo(1e-2, **options), [(6, 4), (3, 4, 5), (6, 4)])
    b = of_rule(Shampoo(1e-2, **options, async_refresh=True), [(6, 4), (3, 4, 5), (6, 4)])
    run_both(a, b, range(7))
    assert b.optimizer.state_dict()  # afterwards nothing is under way
    assert_same(a, b)


def test_an_optimizer_of_ones_own() -> None:
    a = run_of(OwnLion, [(6, 4), (5,)], betas=(0.8, 0.9))
    b = of_rule(Lion(1e-2, betas=(0.8, 0.9)), [(6, 4), (5,)])
    run_both(a, b, range(4))
    assert all_same(a.params, b.params)
    names = list(inspect.signature(OwnLion).parameters)
    assert names[:4] == ["params", "lr", "weight_decay", "betas"]


class Counted(RefreshingRule):
    """A rule that keeps a root for each dim, which a refresh replaces by the root that `by_dim`
    finds, plus 1."""

    def dims(self, matrix: Matrix) -> tuple[int, ...]:
        return (0, 1) if matrix.is_matrix else ()

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        roots = {f"root_{i}": Entry((matrix.shape[i],), "basis", 1.0) for i in self.dims(matrix)}
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
    a = of_rule(Counted(1e-2, state_dtype=dtype), [(3, 4)] * num)
    a.steps(range(3))
    assert all(bool((a.state(i)[f"root_{dim}"] == 4).all()) for i in range(num) for dim in (0, 1))


@dataclass(frozen=True)
class TwoDecays(Rule):
    """AdamW without decay on vectors."""

    weight_decay: float = 0.5

    def on(self, matrix: Matrix) -> Rule:
        decay = 0.0 if matrix.num_dims < 2 else self.weight_decay
        return self.turned_into(AdamWRule, weight_decay=decay)


def test_a_rule_may_have_other_options_for_some_parameters() -> None:
    both = of_rule(TwoDecays(1e-2), [(6,), (3, 4)])
    with_decay, without = (run_of(AdamW, [(6,), (3, 4)], weight_decay=wd) for wd in (0.5, 0.0))
    for one in (both, with_decay, without):
        one.steps(range(3))
    assert all_same(both.params, [without.params[0], with_decay.params[1]])


@dataclass(frozen=True)
class Sign(Rule):
    """Steps by the sign of an average, element by element; its entry is of the default kind."""

    elementwise: ClassVar[bool] = True

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return {"average": Entry(matrix.shape)}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        return s["average"].lerp_(g, 0.5).sign()


def test_an_elementwise_rule_may_have_any_kind_of_entry() -> None:
    a = of_rule(Sign(1e-2), [(4, 5), (3,)])
    a.steps(range(2))
    assert [a.state(i)["average"].shape for i in range(2)] == [p.shape for p in a.params]
