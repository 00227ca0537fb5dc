"""SOAP's state: exact when saved and loaded, as large as predicted, fp32 whatever the parameter."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from soap_helpers import parameter, run, same

from lather.optim import SOAP, state_bytes


@pytest.mark.parametrize("steps_before", [0, 1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_state_dict_is_exact_and_the_next_steps_are_the_same(dtype: torch.dtype, steps_before: int) -> None:
    options = {"precondition_frequency": 3, "second_moment": "rotate"}
    params = [parameter(5, 6, dtype=dtype), parameter(2, 4, 3, dtype=dtype), parameter(6, dtype=dtype), parameter(dtype=dtype)]
    optimizer = SOAP(params, **options)
    run(optimizer, params, range(steps_before))

    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed_params = copy.deepcopy(params)
    resumed = SOAP(resumed_params, **options)
    resumed.load_state_dict(torch.load(file))
    for p, q in zip(params, resumed_params, strict=True):
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        assert all(same(value, resumed.state[q][key]) for key, value in optimizer.state[p].items())

    run(optimizer, params, range(steps_before, steps_before + 5))
    run(resumed, resumed_params, range(steps_before, steps_before + 5))
    for p, q in zip(params, resumed_params, strict=True):
        assert same(p.detach(), q.detach())


def test_loaded_state_is_a_copy() -> None:
    p, q = parameter(4, 4), parameter(4, 4)
    first, second = SOAP([p]), SOAP([q])
    run(first, [p], range(2))
    second.load_state_dict(first.state_dict())
    before = first.state[p]["exp_avg"].clone()
    run(second, [q], range(2, 4))
    assert same(first.state[p]["exp_avg"], before)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_of_the_optimizer_go_on_by_themselves(how: Any) -> None:
    p = parameter(4, 6)
    optimizer = SOAP([p], precondition_frequency=2)
    run(optimizer, [p], range(3))
    other = how(optimizer)
    q = other.param_groups[0]["params"][0]
    assert other.counters == optimizer.counters
    run(optimizer, [p], range(3, 6))
    run(other, [q], range(3, 6))
    assert q is not p
    assert same(p.detach(), q.detach())


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((5, 6), {}),
        ((3, 4, 5), {}),
        ((3, 4, 5), {"matrix_layout": "per_expert"}),
        ((7,), {}),
        ((7,), {"precondition_1d": True}),
        ((), {}),
        ((9, 4), {"max_precond_dim": 8}),
        ((4, 4), {"state_dtype": torch.float64}),
        ((0, 5), {}),
    ],
    ids=str,
)
def test_state_bytes_is_what_is_allocated(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = SOAP([p], **options)
    optimizer.init_state()
    assert state_bytes(shape, options) == sum(value.numel() * value.element_size() for value in optimizer.state[p].values())


def test_init_state_makes_the_keys_that_the_first_step_makes_and_changes_nothing() -> None:
    params = [parameter(4, 5), parameter(3, 4, 5), parameter(6)]
    prepared, plain = SOAP(params), SOAP(copy.deepcopy(params))
    plain_params = plain.param_groups[0]["params"]
    prepared.init_state()
    run(prepared, params, range(4))
    run(plain, plain_params, range(4))
    for p, q in zip(params, plain_params, strict=True):
        assert prepared.state[p].keys() == plain.state[q].keys()
        assert same(p.detach(), q.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_state_is_fp32_whatever_the_parameter_and_wide_parameters_are_not_rounded(dtype: torch.dtype) -> None:
    p = parameter(4, 6, dtype=dtype)
    p.data += 1e-10
    start = p.detach().clone()
    optimizer = SOAP([p], lr=0.0, weight_decay=0.0)
    run(optimizer, [p], range(3))
    assert {value.dtype for value in optimizer.state[p].values()} == {torch.float32}
    assert same(p.detach(), start)


def test_hooks_around_loading_see_and_change_what_is_loaded() -> None:
    a, b = parameter(3, 4), parameter(5, 6)
    saved = SOAP([("a", a), ("b", b)])
    run(saved, [a, b], range(3))
    loaded = SOAP([("b", b), ("a", a)])

    def by_name(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What was saved as a, b in the order b, a."""
        state_dict["state"] = {0: state_dict["state"][1], 1: state_dict["state"][0]}
        return state_dict

    def double(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[a]["exp_avg"].mul_(2)

    loaded.register_load_state_dict_pre_hook(by_name)
    loaded.register_load_state_dict_post_hook(double)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded.state[b]["exp_avg"], saved.state[b]["exp_avg"])
    assert torch.equal(loaded.state[a]["exp_avg"], 2 * saved.state[a]["exp_avg"])
