"""Rules from outside of the package: the rules of `strangers` do what they say, and need nothing
but public names.

The common tests (layouts, batching, state dict and bits after resume, errors, copies, memory) have
them among their kinds, and tests/distributed runs them on every mesh.
"""

import ast
import inspect
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strangers
import torch
from comparison import TOLERANCE, gradients, largest, starting_points
from optim_helpers import all_same, clones, parameter, parameters, run, run_both, same, same_state
from strangers import Lion, Shampoo
from torch.optim.optimizer import ParamsT

from lather.optim import MatrixOptimizer, Rule, constructor

SHAPES = [(6, 6), (5, 8), (8, 5), (7,)]
STEPS = 12


def test_they_take_forty_lines_and_public_names() -> None:
    source = Path(inspect.getfile(strangers)).read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= 40
    imports = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom | ast.Import)
    ]
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports
    }
    assert modules <= {"dataclasses", "torch", "lather.optim", "lather.optim.functional"}
    assert not [
        alias.name for node in imports for alias in node.names if alias.name.startswith("_")
    ]


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
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.8)}
    expected, states = starting_points(SHAPES), [{} for _ in SHAPES]  # type: ignore[var-annotated]
    params = [torch.nn.Parameter(torch.tensor(w)) for w in expected]
    optimizer = MatrixOptimizer(
        params, cls(**{**options, **preset, "state_dtype": torch.float64, **ours})
    )
    for t, grads in enumerate(gradients(SHAPES, STEPS, missing=()), 1):
        for i, g in enumerate(grads):
            params[i].grad = torch.tensor(g)
            expected[i] = formula(
                expected[i],
                g,
                states[i],
                t,
                options["lr"],
                options["weight_decay"],
                options["betas"],
            )
        optimizer.step()
    return (
        max(largest(p.detach().numpy() - w) for p, w in zip(params, expected, strict=True))
        / options["lr"]
    )


@pytest.mark.parametrize("name", FORMULAS)
def test_they_do_what_their_formulas_say(name: str) -> None:
    assert distance(name) < TOLERANCE
    for wrong in ({"lr": 1.01e-2}, {"weight_decay": 0.101}, {"weight_decay_method": "l2"}):
        assert distance(name, **wrong) > 100 * TOLERANCE
    if name == "shampoo":
        assert distance(name, betas=(0.909, 0.8)) > 100 * TOLERANCE
        assert distance(name, betas=(0.9, 0.808)) > 100 * TOLERANCE
        assert distance(name, precondition_frequency=4) > 100 * TOLERANCE


def test_a_momentum_in_parameter_space_is_not_turned_by_a_refresh() -> None:
    p, q = parameter(6, 4), parameter(6, 4)
    often, never = (
        MatrixOptimizer([x], Shampoo(1e-2, precondition_frequency=f)) for x, f in ((p, 1), (q, 100))
    )
    run_both((often, [p]), (never, [q]), range(5))
    assert often.counters["refreshes_done"] == 10
    assert never.counters["refreshes_done"] == 2
    assert same(often.state[p]["exp_avg"], never.state[q]["exp_avg"])
    assert not same(often.state[p]["root_0"], never.state[q]["root_0"])


# --- what the engine does for any rule ------------------------------------------------------------


@dataclass(frozen=True)
class LionOnElements(Lion):
    elementwise = True


def test_a_rule_that_says_it_is_elementwise_has_the_same_bits_with_all_shapes_in_one_batch() -> (
    None
):
    params = parameters([(6, 4), (3, 4, 5), (5,), (), (0, 3)])
    others = clones(params)
    a, b = (
        MatrixOptimizer(params, Lion(1e-2, weight_decay=0.1)),
        MatrixOptimizer(others, LionOnElements(1e-2, weight_decay=0.1)),
    )
    run_both((a, params), (b, others), range(5))
    assert all_same(params, others)
    assert same_state(a, params, b, others)
    assert len({b.state[p]["exp_avg"].untyped_storage().data_ptr() for p in others[:4]}) == 1


@dataclass(frozen=True)
class LateShampoo(Shampoo):
    refreshes_first = False


def test_a_refresh_beside_the_next_step_is_one_after_the_update() -> None:
    params = parameters([(6, 4), (3, 4, 5), (6, 4)])
    others = clones(params)
    a = MatrixOptimizer(
        params, LateShampoo(1e-2, precondition_frequency=2, matrix_layout="per_expert")
    )
    b = MatrixOptimizer(
        others,
        Shampoo(1e-2, precondition_frequency=2, matrix_layout="per_expert", async_refresh=True),
    )
    run_both((a, params), (b, others), range(7))
    assert b.state_dict()  # afterwards nothing is under way
    assert all_same(params, others)
    assert same_state(a, params, b, others)


def test_refreshes_are_spread_over_an_interval() -> None:
    params = parameters([(5, 6)] * 4)
    optimizer = MatrixOptimizer(
        params, Shampoo(1e-2, precondition_frequency=4, stagger_refresh=True)
    )
    done = []
    for step in range(9):
        run(optimizer, params, [step])
        done.append(optimizer.counters["refreshes_done"])
    assert [after - before for before, after in pairwise(done)] == [2] * 8
    assert done[0] == 8


class OwnLion(MatrixOptimizer):
    """An optimizer of one's own, with the options of its rule by name."""

    rule = Lion

    @constructor(Lion)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


def test_an_optimizer_of_ones_own() -> None:
    params = parameters([(6, 4), (5,)])
    others = clones(params)
    a, b = (
        OwnLion(params, lr=1e-2, betas=(0.8, 0.9)),
        MatrixOptimizer(others, Lion(1e-2, betas=(0.8, 0.9))),
    )
    run_both((a, params), (b, others), range(4))
    assert all_same(params, others)
    assert list(inspect.signature(OwnLion).parameters)[:4] == [
        "params",
        "lr",
        "weight_decay",
        "betas",
    ]
    with pytest.raises(TypeError, match="momentum"):
        OwnLion(params, lr=1e-2, momentum=0.9)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^bucket_bytes=0 is not valid"):
        OwnLion(params, lr=1e-2, bucket_bytes=0)
