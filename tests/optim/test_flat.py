"""A rule for matrices says so if it finds none, and refuses flat pieces in their place. (The words
are in `mistakes.txt`.)"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from optim_helpers import (
    CLASSES,
    Run,
    all_same,
    assert_same,
    clones,
    give_gradients,
    parameter,
    parameters,
    run_both,
    run_of,
    snapshot,
)
from torch import nn

from lather.optim import KLSOAP, SOAP, MatrixOptimizer, Muon, PSGDKron, Shampoo

every_rule = pytest.mark.parametrize("name", [name for name in CLASSES if name != "AdamW"])
ADAMW: dict[str, Any] = {"rule": "adamw"}


@pytest.mark.parametrize("made", [SOAP, KLSOAP, Shampoo, PSGDKron])
def test_vectors_that_a_rule_preconditions_need_no_matrix(made: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = run_of(made, [(3,), (5,)], precondition_1d=True)
        run.steps(range(2))
    with pytest.warns(UserWarning, match="is a rule for matrices"):
        run_of(made, [(9,)], precondition_1d=True, max_precond_dim=8)


def test_the_warning_names_the_line_that_made_the_optimizer() -> None:
    for make in (Muon, lambda params, lr: MatrixOptimizer(params, SOAP.rule(lr=lr))):
        with pytest.warns(UserWarning, match="is a rule for matrices") as found:
            make([parameter(3)], lr=1e-2)
        assert found[0].filename == __file__


# --- flattened later, as DeepSpeed's ZeRO and Megatron's distributed optimizer do -----------------


def flat_of(params: Iterable[torch.Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([p.detach().flatten() for p in params]))


def flatten(optimizer: torch.optim.Optimizer, *, keep: Iterable[int] = ()) -> list[nn.Parameter]:
    """Put a flat piece into each group, but not into those with a number in `keep`, in the place of
    its parameters."""
    for number, group in enumerate(optimizer.param_groups):
        if number not in keep:
            group["params"] = [flat_of(group["params"])]
    return [p for group in optimizer.param_groups for p in group["params"]]


@every_rule
@pytest.mark.parametrize("num_steps", [0, 2])
def test_flat_pieces_are_refused_before_anything_changes(name: str, num_steps: int) -> None:
    params = parameters([(4, 3), (5, 3), (3,)])
    optimizer = CLASSES[name]([{"params": params[:2]}, {"params": params[2:], **ADAMW}], lr=1e-2)
    Run(optimizer, params).steps(range(num_steps))
    flat = flatten(optimizer)
    give_gradients(flat, num_steps)
    before = snapshot(optimizer, flat)
    for call in (optimizer.step, optimizer.state_dict, optimizer.init_state, optimizer.step):
        with pytest.raises(ValueError, match=r"now has 1 parameter of shape \(27,\).*ZeRO"):
            call()
    assert all_same(snapshot(optimizer, flat), before)


def test_a_copy_and_a_group_that_was_added_know_that_there_were_matrices() -> None:
    optimizer = SOAP([parameter(4, 3)], lr=1e-2)
    optimizer.add_param_group({"params": [parameter(5, 3)], "rule": "muon"})
    for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x):
        copy_of = copied(optimizer)
        flatten(copy_of, keep=[0])
        with pytest.raises(ValueError, match="muon had matrices"):
            copy_of.step()


def test_flat_pieces_of_the_groups_of_elementwise_rules_are_fine() -> None:
    params, twins = parameters([(4, 3), (5, 3), (3,)]), parameters([(4, 3), (5, 3), (3,)])
    optimizer, whole = (
        Muon([{"params": some[:1]}, {"params": some[1:], **ADAMW}], lr=1e-2)
        for some in (params, twins)
    )
    _, flat = flatten(optimizer, keep=[0])
    for step in range(3):
        give_gradients(twins, step)
        params[0].grad = twins[0].grad
        flat.grad = torch.cat([p.grad.flatten() for p in twins[1:]])
        optimizer.step()
        whole.step()
    assert torch.equal(flat, flat_of(twins[1:]))


def test_weights_that_were_moved_away_are_no_flat_pieces() -> None:
    """Trainers give the memory of weights back between steps: `p.data = torch.empty(0)`."""
    a, b = run_of(SOAP, [(4, 3), (5, 3)]), run_of(SOAP, [(4, 3), (5, 3)])
    run_both(a, b, range(2))
    weights = clones(a.params)
    for p in a.params:
        p.grad, p.data = None, torch.empty(0)
    assert a.optimizer.state_dict()["state"].keys() == {0, 1}
    for p, weight in zip(a.params, weights, strict=True):
        p.data = weight.data
    run_both(a, b, range(2, 4))
    assert_same(a, b)
