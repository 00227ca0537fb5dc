"""The settings under which a phase runs are the optimizer's own inside, and the caller's own after
it."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_helpers import assert_same, every_kind, run_of
from torch import Tensor

from lather.optim import KLSOAP, SOAP
from lather.optim.batched import plan
from lather.optim.batched.plan import matmul_precision
from lather.optim.rules import bases
from lather.optim.rules.kl_soap import KLSOAPRule


def run_program(program: str, *arguments: str) -> None:
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


PROBE = """
import os, sys
import torch
from lather.optim import SOAP
from lather.optim.rules import bases, soap

backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
update, turn = soap.SOAPRule.update, bases.update_eigenbasis_and_momentum


def now():
    return [backend.fp32_precision for backend in backends]


def words():
    try:
        return [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32]
    except RuntimeError:  # the caller has set one backend alone
        return None


def inside():
    #The precision in force: without any value, products are in true fp32, too.
    return [value.replace("none", "ieee") for value in now()] + words()


def probe(setting):
    exec(setting)
    seen = []
    soap.SOAPRule.update = lambda *a: (seen.append(inside()), update(*a))[1]
    bases.update_eigenbasis_and_momentum = lambda *a, **k: (seen.append(inside()), turn(*a, **k))[1]
    before = now(), words()
    p = torch.nn.Parameter(torch.randn(4, 4))
    p.grad = torch.randn(4, 4)
    precisions = {"fp32_matmul_prec": "highest", "qr_fp32_matmul_prec": "medium"}
    SOAP([p], precondition_frequency=1, **precisions).step()
    medium = ["tf32", "bf16", "medium", True]
    assert seen == [["ieee", "ieee", "highest", False], medium, medium], (setting, seen)
    assert (now(), words()) == before, (setting, now(), words(), before)


torch.set_num_threads(1)
SOAP([torch.nn.Parameter(torch.zeros(1))])  # imports what torch imports late
for setting in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        probe(setting)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, setting
"""

SETTINGS = [
    "",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'tf32'",
]


def test_matmul_precision_is_as_asked_inside_and_the_callers_own_after() -> None:
    """Each setting has a process of its own, because torch refuses to go back from one way of
    setting it to another."""
    run_program(PROBE, *SETTINGS)


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
    run_program(INHERITANCE)


@every_kind
def test_autocast_does_not_reach_the_update(kind: str) -> None:
    a, b = (run_of(kind, [(4, 6), (3, 4, 5)], precondition_frequency=1) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a.steps(range(3))
    b.steps(range(3))
    assert_same(a, b)


def settings() -> list[str]:
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    return [backend.fp32_precision for backend in backends]


@pytest.mark.parametrize(
    ("on_gpu", "given", "expected"),
    [(True, "auto", "tf32"), (True, "highest", "ieee"), (False, "auto", "ieee")],
)
def test_on_a_gpu_products_are_tf32_by_default_and_refreshes_never(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, given: str, expected: str
) -> None:
    seen: dict[str, str] = {}

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] = settings()[0].replace("none", "ieee")
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(plan, "is_gpu", lambda _: on_gpu)
    refresh = "update_eigenbasis_and_momentum"
    for owner, name in ((KLSOAPRule, "statistics"), (KLSOAPRule, "update"), (bases, refresh)):
        monkeypatch.setattr(owner, name, recorded(name, getattr(owner, name)))
    run_of(KLSOAP, [(4, 6)], fp32_matmul_prec=given).steps(range(3))
    assert seen == {"statistics": expected, "update": expected, refresh: "ieee"}


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
