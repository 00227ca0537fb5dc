"""torch's default device decides nothing: every tensor that an optimizer makes has the device of
its parameter, or is a count on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optim_helpers import (
    KINDS,
    all_same,
    clones,
    copy_gradients,
    give_gradients,
    make,
    parameters,
    run,
    same_state,
)

from lather.optim import SOAP, AdamW

SHAPES = [(5, 6), (3, 4, 4), (6,), (), (0, 3)]


@contextmanager
def default_device(name: str) -> Iterator[None]:
    """Make `name` the default device inside the block, as a program does that works on a GPU."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "options", [{}, {"nonfinite": "skip", "keep_norm": True}], ids=["plain", "skip"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_on_any_default_device(kind: str, options: dict[str, Any]) -> None:
    """On the meta device a tensor that is made without a device has no values. One expert gets no
    token, and one gradient is not finite; the state is saved and loaded in the middle of the
    run."""
    given = {**KINDS[kind][1], **options}
    params, others = parameters(SHAPES), parameters(SHAPES)
    plain = make(kind, params, **given)
    with default_device("meta"):
        ours = make(kind, others, **given)
    for step in range(4):
        give_gradients(params, step)
        if step:
            params[1].grad[1] = 0.0
        if options and step == 2:
            params[1].grad[2, 0, 0] = torch.nan
        copy_gradients(params, others)
        plain.step()
        with default_device("meta"):
            ours.step()
            if step == 1:
                loaded_params = clones(others)
                loaded = make(kind, loaded_params, **given)
                loaded.init_state()
                loaded.load_state_dict(ours.state_dict())
                ours, others = loaded, loaded_params
    assert all_same(params, others)
    assert same_state(plain, params, ours, others)
    assert {x.device.type for p in others for x in ours.state[p].values()} == {"cpu"}


def test_gradients_are_measured_on_any_default_device() -> None:
    params = parameters([(3, 4), (2, 3, 4)])
    optimizer = SOAP(params, nonfinite="ignore", matrix_layout="per_expert")
    empty = SOAP(parameters([(3, 4)]), nonfinite="ignore")
    give_gradients(params, 0)
    with default_device("meta"):
        for one in (optimizer, empty):
            norms = one.measure_gradients()
            one.step(norms=norms.on_host(norms.values.cpu()))
    assert int(optimizer.state[params[0]]["step"]) == 1


@pytest.mark.parametrize(
    "step", [2, 2.0, torch.tensor(2), torch.tensor(2.0, dtype=torch.float64)], ids=repr
)
def test_a_step_count_of_any_kind_is_brought_to_the_cpu(step: Any) -> None:
    """As torch writes it, the count is fp32 and on the CPU, after loading and where it is replaced
    in the state."""
    params = parameters([(3, 4)])
    optimizer = AdamW(params)
    run(optimizer, params, range(2))
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = step
    resumed = AdamW(parameters([(3, 4)]))
    with default_device("meta"):
        resumed.load_state_dict(saved)
    (state,) = resumed.state.values()
    assert (state["step"].device.type, state["step"].dtype, float(state["step"])) == (
        "cpu",
        torch.float32,
        2.0,
    )
    optimizer.state[params[0]]["step"] = step
    run(optimizer, params, range(2, 3))
    assert float(optimizer.state[params[0]]["step"]) == 3.0
