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
from strangers import Lion, Shampoo
from torch import nn

from lather.optim import (
    KLSOAP,
    REKLS,
    SOAP,
    AdamW,
    EmbeddingSOAP,
    MatrixOptimizer,
    Muon,
    parameter_groups,
)

every_rule = pytest.mark.parametrize("name", [name for name in CLASSES if name != "AdamW"])
ADAMW: dict[str, Any] = {"rule": "adamw"}
MUON: dict[str, Any] = {"rule": "muon"}


def warnings_of(make: Any, *args: Any, **options: Any) -> list[str]:
    """Return the texts of the warnings while an optimizer is made."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make(*args, **options)
    return [str(one.message) for one in found]


@every_rule
@pytest.mark.parametrize("shapes", [((46,),), ((0,), (0,)), ((), (3,))], ids=str)
def test_a_rule_without_a_matrix_warns_once_with_the_remedy(name: str, shapes: Any) -> None:
    params = [parameter(*shape) for shape in shapes]
    (text,) = warnings_of(CLASSES[name], params, lr=1e-2, matrix_layout="tensor")
    assert text.startswith(f"{CLASSES[name].rule.name} is a rule for matrices, but has none among")
    words = (f" {len(shapes)} parameter", str(shapes[0]), "ZeRO", "fully_shard", "rule='adamw'")
    assert all(word in text for word in words)


@every_rule
def test_matrices_count_whatever_stands_beside_them(name: str) -> None:
    matrix, vector, frozen = parameter(4, 3), parameter(3), parameter(4, 3)
    frozen.requires_grad_(requires_grad=False)
    on_meta = nn.Parameter(torch.empty(4, 3, device="meta"))
    groups = [{"params": [vector]}, {"params": [matrix]}]
    for params in ([matrix, vector], groups, [frozen, vector], [on_meta], [parameter(0, 3)]):
        assert warnings_of(CLASSES[name], params, lr=1e-2, matrix_layout="tensor") == []


@every_rule
def test_a_default_rule_for_matrices_warns_of_flat_pieces_in_elementwise_groups(name: str) -> None:
    """ZeRO's pieces have no mark, and `parameter_groups` gives all of them to AdamW."""
    pieces = parameter_groups([("a", parameter(46)), ("b", parameter(7))])
    by_hand = [{"params": [parameter(46)], **ADAMW}, {"params": []}]
    for groups, number in ((pieces, "2 parameters"), (by_hand, "1 parameter ")):
        (text,) = warnings_of(CLASSES[name], groups, lr=1e-2)
        rule = CLASSES[name].rule.name
        assert text.startswith(f"{rule} is a rule for matrices, but has none among {number}")
        words = ("other rules (adamw)", "ZeRO", "fully_shard", "take AdamW")
        assert all(word in text for word in words)


def test_rules_and_groups_without_a_warning() -> None:
    """Elementwise rules need no matrix; norms without an embedding under another rule than the
    default one are meant to be there; SOAP has bases of three dims."""
    flat, table, vector = parameter(46), parameter(5, 4), parameter(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    for make, params, options in (
        (AdamW, [flat], {}),
        (AdamW, [flat], {"keep_norm": True}),
        (AdamW, parameter_groups([("flat", flat)]), {}),
        (SOAP, [{"params": [table], **ADAMW}], {}),
        (SOAP, [{"params": []}], {}),
        (SOAP, [{"params": [table]}, {"params": [vector], **ADAMW}], {}),
        (SOAP, [parameter(3, 4, 4)], {}),
        (Muon, parameter_groups(model, rest_rule="embedding_soap"), {}),
        (Muon, [parameter(3, 4, 4)], {"matrix_layout": "per_expert"}),
        *((cls, [parameter(4, 3, 2, 2)], {"matrix_layout": "tensor"}) for cls in (SOAP, KLSOAP)),
        (REKLS, [parameter(4, 3, 2, 2)], {"matrix_layout": "tensor"}),
    ):
        assert warnings_of(make, params, lr=1e-2, **options) == [], (make, options)


def test_groups_of_a_rule_count_together_and_each_rule_counts() -> None:
    matrix, vector = parameter(4, 3), parameter(3)
    (text,) = warnings_of(SOAP, [{"params": [vector]}, {"params": [matrix], **MUON}], lr=1e-2)
    assert text.startswith("soap ")
    texts = warnings_of(SOAP, [{"params": [vector]}, {"params": [parameter(5)], **MUON}], lr=1e-2)
    assert sorted(text.split()[0] for text in texts) == ["muon", "soap"]
    (text,) = warnings_of(EmbeddingSOAP, [vector], lr=1e-2)
    assert text.startswith("embedding_soap ")


@pytest.mark.parametrize("name", ["Muon", "SOAPMuon"])
def test_stacks_and_convolutions_get_a_remedy_that_works(name: str) -> None:
    (text,) = warnings_of(CLASSES[name], [parameter(3, 4, 4)], lr=1e-2)
    assert "matrix_layout='per_expert' or 'stacked'" in text
    assert "ZeRO" not in text
    (text,) = warnings_of(CLASSES[name], [parameter(4, 3, 2, 2)], lr=1e-2)
    words = ("four dims", "rule='adamw'", "rate of its own", "matrix_layout='tensor'")
    assert all(word in text for word in words)
    assert "per_expert" not in text


@pytest.mark.parametrize("rule", [Lion, Shampoo])
def test_rules_of_strangers_are_for_matrices_unless_they_are_elementwise(rule: Any) -> None:
    assert len(warnings_of(MatrixOptimizer, [parameter(46)], rule(lr=1e-2))) == 1
    assert warnings_of(MatrixOptimizer, [parameter(4, 3)], rule(lr=1e-2)) == []


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
    assert warnings_of(optimizer.add_param_group, {"params": [parameter(3)], **MUON}) == []
    optimizer.add_param_group({"params": [parameter(5, 3)], **MUON})
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
