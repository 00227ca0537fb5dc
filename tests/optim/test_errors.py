"""Bad gradients and bad options: one clear error before anything is changed."""

import logging
from typing import Any

import pytest
import torch
from soap_helpers import give_gradients, parameter, run, same, snapshot

from lather.optim import SOAP
from lather.optim.soap import check_soap_options


def nan_setup(nonfinite: str) -> tuple[SOAP, list[torch.nn.Parameter]]:
    params = [parameter(4, 4), parameter(3, 4, seed=1)]
    optimizer = SOAP([("first", params[0]), ("second", params[1])], nonfinite=nonfinite, precondition_frequency=1)
    run(optimizer, params, range(3))
    give_gradients(params, 3)
    params[1].grad[0, 0] = torch.nan
    return optimizer, params


def test_nonfinite_raise_names_the_parameter_and_changes_nothing() -> None:
    optimizer, params = nan_setup("raise")
    before = snapshot(optimizer, params)
    with pytest.raises(ValueError, match=r"'second' is not finite.*nonfinite='skip'"):
        optimizer.step()
    assert all(map(same, before, snapshot(optimizer, params)))


def test_nonfinite_skip_passes_over_that_parameter_alone_and_counts() -> None:
    optimizer, params = nan_setup("skip")
    first, second = (p.detach().clone() for p in params)
    optimizer.step()
    assert not torch.equal(params[0].detach(), first)
    assert same(params[1].detach(), second)
    assert int(optimizer.state[params[1]]["step"]) == 3
    assert optimizer.counters["nonfinite_skipped"] == 1


def test_nonfinite_ignore_lets_it_through() -> None:
    optimizer, params = nan_setup("ignore")
    optimizer.step()
    assert params[1].isnan().any()


def test_sparse_gradient_is_refused_before_anything_changes() -> None:
    p, embedding = parameter(3, 3), torch.nn.Embedding(5, 3, sparse=True)
    optimizer = SOAP([p, embedding.weight])
    give_gradients([p], 0)
    embedding(torch.tensor([1])).sum().backward()
    before = p.detach().clone()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    assert same(p.detach(), before)
    assert not optimizer.state


BAD_OPTIONS = [
    ("lr", -1e-3),
    ("lr", float("nan")),
    ("lr", "fast"),
    ("betas", (0.9, 1.0)),
    ("betas", (-0.1, 0.9)),
    ("betas", (0.9,)),
    ("shampoo_beta", 1.0),
    ("eps", -1e-8),
    ("weight_decay", -0.1),
    ("use_decoupled_weight_decay", 1),
    ("precondition_frequency", 0),
    ("precondition_frequency", 2.5),
    ("precondition_warmup_steps", -1),
    ("adam_warmup_steps", 1.5),
    ("max_precond_dim", -1),
    ("second_moment", "turn"),
    ("fp32_matmul_prec", "tf32"),
    ("qr_fp32_matmul_prec", "low"),
    ("adaptive_update_tolerance", 0.0),
    ("adaptive_update_tolerance", 1.0),
    ("power_iter_steps", 0),
    ("max_update_rms", -1.0),
    ("matrix_layout", "per_head"),
    ("nonfinite", "warn"),
    ("state_dtype", torch.bfloat16),
    ("max_state_bytes", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS, ids=str)
def test_bad_option_names_itself_its_value_and_the_constraint(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as error:
        check_soap_options({**SOAP([parameter(2, 2)]).defaults, name: value})
    assert repr(value) in str(error.value)
    assert "give " in str(error.value)


def test_bad_option_in_a_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = SOAP([parameter(2, 2)])
    for bad in ({"lr": -1.0}, {"learning_rate": 1.0}, {"max_state_bytes": 10}):
        with pytest.raises(ValueError, match=r"lr|learning_rate|max_state_bytes"):
            optimizer.add_param_group({"params": [parameter(3, 3)], **bad})
        assert len(optimizer.param_groups) == 1


def test_complex_parameters_and_vectors_among_experts_are_refused() -> None:
    with pytest.raises(TypeError, match="complex"):
        SOAP([torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match=r"'norm' has shape \(3,\).*per_expert.*needs a matrix"):
        SOAP([("norm", parameter(3))], matrix_layout="per_expert")


def test_too_much_state_is_refused_with_size_parameter_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"'big'.*GiB.*max_precond_dim.*per_expert") as error:
        SOAP([("big", torch.nn.Parameter(torch.empty(4096, 4096, device="meta")))], max_state_bytes=2**28)
    assert "0.375 GiB" in str(error.value)


@pytest.mark.parametrize(
    ("adam", "precondition", "expected"), [(0, 0, 1), (-3, 0, 1), (5, 0, 5), (5, 5, 4), (9, 3, 2), (4, 1, 1), (2, 6, 2)]
)
def test_warm_ups_are_brought_into_order_and_logged(adam: int, precondition: int, expected: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lather"):
        optimizer = SOAP([parameter(2, 2)], adam_warmup_steps=adam, precondition_warmup_steps=precondition)
    assert optimizer.param_groups[0]["adam_warmup_steps"] == expected
    assert ("adam_warmup_steps" in caplog.text) == (adam != expected)


@pytest.mark.parametrize("value", [0, 2.5, None])
def test_a_frequency_that_gives_nonsense_raises_before_anything_changes(value: Any) -> None:
    p = parameter(3, 3)
    optimizer = SOAP([p], precondition_frequency=lambda t: value if t == 3 else 1)
    run(optimizer, [p], range(2))
    before = snapshot(optimizer, [p])
    with pytest.raises(ValueError, match=r"precondition_frequency.*step 3"):
        run(optimizer, [p], range(2, 3))
    assert all(map(same, before, snapshot(optimizer, [p])))


def test_a_factor_that_overflows_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    p = parameter(4, 6)
    optimizer = SOAP([p], precondition_frequency=1)
    run(optimizer, [p], range(2))
    basis = optimizer.state[p]["basis_0"].clone()
    p.grad = torch.full((4, 6), 1e25)
    optimizer.step()
    assert optimizer.counters["refreshes_failed"] == 2
    assert "shape (4, 6)" in caplog.text
    assert same(optimizer.state[p]["basis_0"], basis)
