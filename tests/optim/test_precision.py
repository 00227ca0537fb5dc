"""The settings under which a phase runs are the optimizer's own inside, and the caller's own after
it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_helpers import assert_same, every_kind, run_of
from torch import Tensor

from lather.optim import KLSOAP, SOAP
from lather.optim.batched import runs
from lather.optim.batched.plan import matmul_precision
from lather.optim.rules import bases
from lather.optim.rules.kl_soap import KLSOAPRule
from scripts import printed_by

INHERITANCE = """
import itertools, sys
import torch
from torch._C import _get_fp32_precision_getter as get, _set_fp32_precision_setter as put
from lather.optim.batched.plan import matmul_precision

sys.path.append("tests/optim")
from optim_helpers import KINDS, make, parameters, run

WHOLES = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]
PRODUCTS = [("cuda", "matmul"), ("mkldnn", "matmul")]
OTHERS = [(backend, op) for backend in ("cuda", "mkldnn") for op in ("conv", "rnn")]
ALL = ["none", "ieee", "tf32", "bf16"]
VALUES = {"cuda": ALL[:3], "mkldnn": ALL, "generic": ALL}
INSIDE = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}
RULES = "soap kl_soap rekls stacked_soap muon soap_muon adamw shampoo lion".split()


def now():
    try:
        word = torch.get_float32_matmul_precision()
    except RuntimeError:  # it contradicts the backends
        word = None
    return [get(*key) for key in WHOLES + PRODUCTS + OTHERS] + [word]


def seen_later():
    found = [now()]
    for key in WHOLES:
        for value in VALUES[key[0]]:
            put(*key, value)
            found.append(now())
    return found


def give(word, values):
    torch.set_float32_matmul_precision(word)
    for key, value in zip(WHOLES + PRODUCTS, values):
        put(*key, value)


def check(word, values, work):
    give(word, values)
    expected = seen_later()
    give(word, values)
    work()
    assert seen_later() == expected, (word, values)


def enter(precision):
    try:
        with matmul_precision(precision):
            assert torch.get_float32_matmul_precision() == precision
            for key, value in zip(PRODUCTS, INSIDE[precision]):
                assert get(*key) == value or (get(*key), value) == ("none", "ieee")
            raise KeyError
    except KeyError:
        pass


def step(kind):
    options = {} if kind in ("adamw", "muon", "lion") else {"qr_fp32_matmul_prec": "medium"}
    params = parameters([(4, 6), (3,)])
    run(make(kind, params, fp32_matmul_prec="high", **options), params, range(3))


possible = [VALUES[backend] for backend, _ in WHOLES + PRODUCTS]
for word, values in itertools.product(INSIDE, itertools.product(*possible)):
    for precision in INSIDE:
        check(word, values, lambda: enter(precision))
inherited, own = ["tf32"] + ["none"] * 4, ["none"] * 3 + ["tf32"] * 2
for kind in RULES:
    for word, values in (("highest", ["none"] * 5), ("high", inherited), ("high", own)):
        check(word, values, lambda: step(kind))
"""


def test_what_was_inherited_is_inherited_after_a_step_and_what_was_set_stays_set() -> None:
    """Every combination of values of all backends, of a backend and of its products, and every
    word: whatever is set later has the effect that it has without a step, also after an
    exception."""
    printed_by(INHERITANCE)


@every_kind
def test_autocast_does_not_reach_the_update(kind: str) -> None:
    a, b = (run_of(kind, [(4, 6), (3, 4, 5)], precondition_frequency=1) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a.steps(range(3))
    b.steps(range(3))
    assert_same(a, b)


def settings() -> list[str]:
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    return [backend.fp32_precision for backend in backends]


TRUE, TF32, BF16 = ["ieee", "ieee"], ["tf32", "tf32"], ["tf32", "bf16"]


@pytest.mark.parametrize(
    ("on_gpu", "options", "products", "refreshes"),
    [
        (True, {}, TF32, TRUE),
        (True, {"fp32_matmul_prec": "highest"}, TRUE, TRUE),
        (False, {}, TRUE, TRUE),
        (False, {"fp32_matmul_prec": "high", "qr_fp32_matmul_prec": "medium"}, TF32, BF16),
        (True, {"fp32_matmul_prec": "medium", "qr_fp32_matmul_prec": "high"}, BF16, TF32),
    ],
    ids=str,
)
def test_each_phase_has_its_precision_and_on_a_gpu_products_are_tf32_by_default(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, options: Any, products: Any, refreshes: Any
) -> None:
    seen: dict[str, list[str]] = {}

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] = [value.replace("none", "ieee") for value in settings()]
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(runs, "is_gpu", lambda _: on_gpu)
    refresh, before = "update_eigenbasis_and_momentum", settings()
    for owner, name in ((KLSOAPRule, "statistics"), (KLSOAPRule, "update"), (bases, refresh)):
        monkeypatch.setattr(owner, name, recorded(name, getattr(owner, name)))
    run_of(KLSOAP, [(4, 6)], **options).steps(range(3))
    assert seen == {"statistics": products, "update": products, refresh: refreshes}
    assert settings() == before


def test_the_caller_has_its_precision_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        assert settings() == ["tf32", "tf32"]
        raise RuntimeError("half-way")

    before, word = settings(), torch.get_float32_matmul_precision()
    monkeypatch.setattr("lather.optim.rules.soap.SOAPRule.update", fail)
    with pytest.raises(RuntimeError, match="half-way"):
        run_of(SOAP, [(4, 6)], fp32_matmul_prec="high").steps(range(1))
    assert (settings(), torch.get_float32_matmul_precision()) == (before, word)


def test_compiled_code_is_compiled_once_under_the_callers_precision_and_may_run_inside() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(settings())
        return graph.forward

    before = settings()
    loss = torch.compile(lambda w: w.square().sum(), backend=backend)
    a = run_of(SOAP, [(4, 6)], precondition_frequency=1, fp32_matmul_prec="high")
    for _ in range(4):
        loss(a.params[0]).backward()
        a.optimizer.step()
        a.optimizer.zero_grad()
    assert seen == [before]
    with matmul_precision("high"):
        loss(a.params[0])  # its guards read the global setting, which has changed
    assert seen == [before, ["tf32", "tf32"]]
