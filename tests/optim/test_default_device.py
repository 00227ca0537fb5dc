"""torch's default device decides nothing: every tensor that an optimizer makes has the device of
its parameter, or is a count on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optim_helpers import KINDS, assert_same, copy_gradients, give_gradients, run_of

from in_turn import in_turn
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
    ("kind", "options"), in_turn(KINDS, [{}, {"nonfinite": "skip", "keep_norm": True}]), ids=str
)
def test_a_run_is_the_same_on_any_default_device(kind: str, options: dict[str, Any]) -> None:
    """On the meta device a tensor that is made without a device has no values. One expert gets no
    token, and one gradient is not finite; the state is saved and loaded in the middle of the
    run."""
    a, b, c = (run_of(kind, SHAPES, **options) for _ in range(3))
    for step in range(4):
        give_gradients(a.params, step)
        if step:
            a.params[1].grad[1] = 0.0
        if options and step == 2:
            a.params[1].grad[2, 0, 0] = torch.nan
        copy_gradients(a.params, b.params)
        a.optimizer.step()
        with default_device("meta"):
            b.optimizer.step()
            if step == 1:
                for p, q in zip(b.params, c.params, strict=True):
                    q.data.copy_(p.data)
                c.optimizer.init_state()
                c.optimizer.load_state_dict(b.optimizer.state_dict())
                b = c
    assert_same(a, b)
    assert {x.device.type for p in b.params for x in b.optimizer.state[p].values()} == {"cpu"}


def test_gradients_are_measured_on_any_default_device() -> None:
    a = run_of(SOAP, [(3, 4), (2, 3, 4)], nonfinite="ignore", matrix_layout="per_expert")
    empty = run_of(SOAP, [(3, 4)], nonfinite="ignore")
    give_gradients(a.params, 0)
    with default_device("meta"):
        for one in (a, empty):
            norms = one.optimizer.measure_gradients()
            one.optimizer.step(norms=norms.on_host(norms.values.cpu()))
    assert int(a.state(0)["step"]) == 1


@pytest.mark.parametrize(
    "step", [2, 2.0, torch.tensor(2), torch.tensor(2.0, dtype=torch.float64)], ids=repr
)
def test_a_step_count_of_any_kind_is_brought_to_the_cpu(step: Any) -> None:
    """As torch writes it, the count is fp32 and on the CPU, after loading and where it is replaced
    in the state."""
    a, b = run_of(AdamW, [(3, 4)]), run_of(AdamW, [(3, 4)])
    a.steps(range(2))
    saved = a.optimizer.state_dict()
    saved["state"][0]["step"] = step
    with default_device("meta"):
        b.optimizer.load_state_dict(saved)
    x = b.state(0)["step"]
    assert (x.device.type, x.dtype, float(x)) == ("cpu", torch.float32, 2.0)
    a.state(0)["step"] = step
    a.steps(range(2, 3))
    assert float(a.state(0)["step"]) == 3.0
