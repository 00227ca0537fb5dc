"""A rule for matrices says so if it finds none, and refuses flat pieces in their place."""

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
    all_same,
    clones,
    give_gradients,
    parameter,
    parameters,
    run,
    same_state,
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

FOR_MATRICES = tuple(name for name in CLASSES if name != "AdamW")
PLAIN = {"lr": 1e-2, "matrix_layout": "tensor"}
every_rule = pytest.mark.parametrize("name", FOR_MATRICES)


def warnings_of(make: Any, *args: Any, **options: Any) -> list[str]:
    """Return the texts of the warnings while an optimizer is made."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make(*args, **options)
    return [str(one.message) for one in found]


@every_rule
@pytest.mark.parametrize("shapes", [((46,),), ((0,), (0,)), ((), (3,))], ids=str)
def test_a_rule_without_a_matrix_warns_once_with_the_remedy(name: str, shapes: Any) -> None:
    (text,) = warnings_of(CLASSES[name], [parameter(*shape) for shape in shapes], **PLAIN)
    assert text.startswith(f"{CLASSES[name].rule.name} is a rule for matrices, but has none among")
    assert f" {len(shapes)} parameter" in text
    assert str(shapes[0]) in text
    for word in ("ZeRO", "fully_shard", "rule='adamw'"):
        assert word in text


@every_rule
def test_matrices_count_whatever_stands_beside_them(name: str) -> None:
    matrix, vector, frozen = parameter(4, 3), parameter(3), parameter(4, 3)
    frozen.requires_grad_(requires_grad=False)
    cls = CLASSES[name]
    on_meta = nn.Parameter(torch.empty(4, 3, device="meta"))
    groups = [{"params": [vector]}, {"params": [matrix]}]
    for params in ([matrix, vector], groups, [frozen, vector], [on_meta], [parameter(0, 3)]):
        assert warnings_of(cls, params, **PLAIN) == []


def test_elementwise_rules_need_no_matrix() -> None:
    assert warnings_of(AdamW, [parameter(46)], lr=1e-2) == []
    assert warnings_of(AdamW, [parameter(46)], lr=1e-2, keep_norm=True) == []
    assert warnings_of(AdamW, parameter_groups([("flat", parameter(46))]), lr=1e-2) == []
    table: dict[str, Any] = {"params": [parameter(5, 4)], "rule": "adamw"}
    assert warnings_of(SOAP, [table], lr=1e-2) == []
    assert warnings_of(SOAP, [{"params": []}], lr=1e-2) == []


@every_rule
def test_a_default_rule_for_matrices_warns_of_flat_pieces_in_elementwise_groups(name: str) -> None:
    """ZeRO's pieces have no mark, and `parameter_groups` gives all of them to AdamW."""
    pieces = parameter_groups([("a", parameter(46)), ("b", parameter(7))])
    by_hand = [{"params": [parameter(46)], "rule": "adamw"}, {"params": []}]
    for groups, number in ((pieces, "2 parameters"), (by_hand, "1 parameter ")):
        (text,) = warnings_of(CLASSES[name], groups, lr=1e-2)
        rule = CLASSES[name].rule.name
        assert text.startswith(f"{rule} is a rule for matrices, but has none among {number}")
        for word in ("other rules (adamw)", "ZeRO", "fully_shard", "take AdamW"):
            assert word in text


def test_groups_of_a_rule_count_together_and_each_rule_counts() -> None:
    matrix, vector = parameter(4, 3), parameter(3)
    muon: dict[str, Any] = {"rule": "muon"}
    rest: dict[str, Any] = {"params": [vector], "rule": "adamw"}
    assert warnings_of(SOAP, [{"params": [matrix]}, rest], lr=1e-2) == []
    (text,) = warnings_of(SOAP, [{"params": [vector]}, {"params": [matrix], **muon}], lr=1e-2)
    assert text.startswith("soap ")
    texts = warnings_of(SOAP, [{"params": [vector]}, {"params": [parameter(5)], **muon}], lr=1e-2)
    assert sorted(text.split()[0] for text in texts) == ["muon", "soap"]


def test_norms_without_an_embedding_under_embedding_soap_are_meant_to_be_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert warnings_of(Muon, parameter_groups(model, rest_rule="embedding_soap"), lr=1e-2) == []
    (text,) = warnings_of(EmbeddingSOAP, model[1].parameters(), lr=1e-2)
    assert text.startswith("embedding_soap ")


def test_stacks_that_muon_leaves_to_adamw_get_the_layout_as_remedy() -> None:
    (text,) = warnings_of(Muon, [parameter(3, 4, 4)], lr=1e-2)
    assert "matrix_layout='per_expert' or 'stacked'" in text
    assert "ZeRO" not in text
    assert warnings_of(Muon, [parameter(3, 4, 4)], lr=1e-2, matrix_layout="per_expert") == []
    assert warnings_of(SOAP, [parameter(3, 4, 4)], lr=1e-2) == []  # it has bases of three dims


@pytest.mark.parametrize("name", ["Muon", "SOAPMuon"])
def test_convolutions_get_a_remedy_that_works(name: str) -> None:
    groups: list[dict[str, Any]] = [{"params": [parameter(4, 3, 2, 2)]}]
    (text,) = warnings_of(CLASSES[name], groups, lr=1e-2)
    for word in ("four dims", "rule='adamw'", "rate of its own", "matrix_layout='tensor'"):
        assert word in text
    assert "per_expert" not in text
    for cls in (SOAP, KLSOAP, REKLS):
        assert warnings_of(cls, groups, lr=1e-2, matrix_layout="tensor") == []


@pytest.mark.parametrize("rule", [Lion, Shampoo])
def test_rules_of_strangers_are_for_matrices_unless_they_are_elementwise(rule: Any) -> None:
    assert len(warnings_of(MatrixOptimizer, [parameter(46)], rule(lr=1e-2))) == 1
    assert warnings_of(MatrixOptimizer, [parameter(4, 3)], rule(lr=1e-2)) == []


def test_the_warning_names_the_line_that_made_the_optimizer() -> None:
    for make in (Muon, lambda params, lr: MatrixOptimizer(params, SOAP.rule(lr=lr))):
        with pytest.warns(UserWarning, match="is a rule for matrices") as found:
            make([parameter(3)], lr=1e-2)  # type: ignore[operator]
        assert found[0].filename == __file__


# --- flattened later, as DeepSpeed's ZeRO and Megatron's distributed optimizer do -----------------


def flat_of(params: Iterable[torch.Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([p.detach().flatten() for p in params]))


def flatten(optimizer: torch.optim.Optimizer, *, keep: Iterable[int] = ()) -> list[nn.Parameter]:
    """Put a flat piece into each group, but not into those with a number in `keep`, in the place of
    its parameters."""
    flat = []
    for number, group in enumerate(optimizer.param_groups):
        if number not in keep:
            group["params"] = [flat_of(group["params"])]
        flat += group["params"]
    return flat


@every_rule
@pytest.mark.parametrize("num_steps", [0, 2])
def test_flat_pieces_are_refused_before_anything_changes(name: str, num_steps: int) -> None:
    params = parameters([(4, 3), (5, 3), (3,)])
    groups = [{"params": params[:2]}, {"params": params[2:], "rule": "adamw"}]
    optimizer = CLASSES[name](groups, lr=1e-2)
    run(optimizer, params, range(num_steps))
    flat = flatten(optimizer)
    give_gradients(flat, num_steps)
    before = snapshot(optimizer, flat)
    for call in (optimizer.step, optimizer.state_dict, optimizer.init_state, optimizer.step):
        with pytest.raises(ValueError, match=r"now has 1 parameter of shape \(27,\).*ZeRO"):
            call()
    assert all_same(snapshot(optimizer, flat), before)


def test_a_copy_of_an_optimizer_knows_that_it_had_matrices() -> None:
    for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        optimizer = copied(Muon([parameter(4, 3)], lr=1e-2))
        flatten(optimizer)
        with pytest.raises(ValueError, match="muon had matrices"):
            optimizer.state_dict()


def test_flat_pieces_of_the_groups_of_elementwise_rules_are_fine() -> None:
    params = parameters([(4, 3), (5, 3), (3,)])
    twins = clones(params)
    optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "rule": "adamw"}], lr=1e-2)
    whole = Muon([{"params": twins[:1]}, {"params": twins[1:], "rule": "adamw"}], lr=1e-2)
    _, flat = flatten(optimizer, keep=[0])
    for step in range(3):
        give_gradients(twins, step)
        params[0].grad = twins[0].grad
        flat.grad = torch.cat([p.grad.flatten() for p in twins[1:]])
        optimizer.step()
        whole.step()
    assert torch.equal(flat, flat_of(twins[1:]))


def test_norms_that_cannot_be_kept_on_flat_pieces() -> None:
    optimizer = AdamW([parameter(4, 3)], lr=1e-2, keep_norm=True)
    flatten(optimizer)
    with pytest.raises(ValueError, match="adamw had matrices"):
        optimizer.state_dict()


def test_weights_that_were_moved_away_are_no_flat_pieces() -> None:
    """Trainers give the memory of weights back between steps: `p.data = torch.empty(0)`."""
    params = parameters([(4, 3), (5, 3)])
    optimizer, twins = SOAP(params, lr=1e-2), clones(params)
    other = SOAP(twins, lr=1e-2)
    run(optimizer, params, range(2))
    run(other, twins, range(2))
    weights = [p.data for p in params]
    for p in params:
        p.grad, p.data = None, torch.empty(0)
    saved = optimizer.state_dict()
    assert saved["state"].keys() == {0, 1}
    for p, weight in zip(params, weights, strict=True):
        p.data = weight
    run(optimizer, params, range(2, 4))
    run(other, twins, range(2, 4))
    assert all_same(params, twins)
    assert same_state(optimizer, params, other, twins)


def test_groups_that_are_added_later_count_and_are_not_warned_of() -> None:
    optimizer = SOAP([parameter(4, 3)], lr=1e-2)
    assert warnings_of(optimizer.add_param_group, {"params": [parameter(3)], "rule": "muon"}) == []
    optimizer.add_param_group({"params": [parameter(5, 3)], "rule": "muon"})
    flatten(optimizer, keep=[0])
    with pytest.raises(ValueError, match="muon had matrices"):
        optimizer.step()
