"""`async_refresh`: the bases that are computed between two steps are there for the second, whatever
happens in between."""

import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from optim_helpers import (
    SOAP_KINDS,
    Run,
    all_same,
    assert_same,
    give_gradients,
    parameters,
    run_both,
    run_of,
    same_state,
)
from torch import Tensor

from in_turn import in_turn
from lather.optim import KLSOAP, SOAP
from lather.optim.batched import refresh, streams, visits
from lather.optim.linalg import eigenbasis
from lather.optim.rules.kl_soap import KLSOAPRule

UPDATE_FIRST = [kind for kind in SOAP_KINDS if kind.startswith("soap")]
ADAPTIVE: dict[str, Any] = {"use_adaptive_criteria": True}
KL_KINDS = [kind for kind in SOAP_KINDS if not kind.startswith("soap")]


def assert_same_at_the_end(a: Run, b: Run) -> None:
    """Check that the weights are equal, and the states after the refreshes that are under way."""
    assert all_same(a.params, b.params)
    assert b.optimizer.state_dict()
    assert a.optimizer.state_dict()
    assert_same(a, b)
    assert a.optimizer.counters == b.optimizer.counters


@pytest.mark.parametrize(
    ("kind", "options"),
    in_turn(
        [*UPDATE_FIRST, "soap_muon", "soap_muon_per_expert"],
        [{}, {"stagger_refresh": True}, ADAPTIVE, {"refresh_method": "eigh"}],
        each=2,
    ),
    ids=str,
)
def test_soap_has_the_same_bits(kind: str, options: dict[str, Any]) -> None:
    a, b = run_of(kind, **options), run_of(kind, async_refresh=True, **options)
    run_both(a, b, range(8))
    assert_same_at_the_end(a, b)


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_the_kl_rules_refresh_after_the_update(
    kind: str, warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = run_of(kind, adam_warmup_steps=warmup)
    monkeypatch.setattr(KLSOAPRule, "refreshes_first", False)
    a.steps(range(8))
    monkeypatch.undo()
    b = run_of(kind, adam_warmup_steps=warmup, async_refresh=True)
    b.steps(range(8))
    assert_same_at_the_end(a, b)


@pytest.mark.parametrize(
    ("kind", "options"),
    in_turn(SOAP_KINDS, [{}, ADAPTIVE, {"second_moment": "rotate"}, {"refresh_method": "eigh"}]),
    ids=str,
)
def test_pieces_that_the_caller_does_between_two_steps_have_the_same_bits(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run under the settings of a step, whatever the caller's are."""
    monkeypatch.setattr(refresh, "CPU_REFRESH_BYTES", 1)  # so that a batch is one matrix and dim
    a, b = (run_of(kind, async_refresh=True, **options) for _ in range(2))
    refreshes, done = b.optimizer.defer_refreshes(), []
    for step in range(8):
        run_both(a, b, [step])
        # none after the first step, then more and more: the next step does the rest
        done.append(min(step, len(refreshes)))
        for _ in range(done[-1]):
            with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
                refreshes.work()
    assert sum(done) > 4
    assert_same_at_the_end(a, b)
    assert not refreshes


def test_it_may_differ_per_group() -> None:
    params = parameters([(6, 4)] * 4)
    groups = [{"params": params[:2]}, {"params": params[2:], "async_refresh": True}]
    joint = Run(KLSOAP(groups, lr=1e-2), params)
    others = parameters([(6, 4)] * 4)
    early, late = KLSOAP(others[:2], lr=1e-2), KLSOAP(others[2:], lr=1e-2, async_refresh=True)
    for step in range(6):
        joint.steps([step])
        give_gradients(others, step)
        early.step()
        late.step()
    assert all_same(params, others)


RETRIED = {"precondition_frequency": 1, "refresh_method": "cholesky_qr"}
"""Options for `cholesky_qr_breaks`: on a CPU these refreshes, too, end after their step."""


@pytest.fixture
def cholesky_qr_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(rows: Tensor, method: str) -> tuple[Tensor, Tensor]:
        out, failed = real(rows, method)
        return out, failed | (method == "cholesky_qr")

    real = eigenbasis.orthonormal_rows
    monkeypatch.setattr(eigenbasis, "orthonormal_rows", breaks)


@pytest.mark.usefixtures("cholesky_qr_breaks")
def test_a_refresh_that_fails_is_retried_before_anyone_sees_the_state() -> None:
    a = run_of(SOAP, [(6, 4)] * 2, **RETRIED)
    b = run_of(SOAP, [(6, 4)] * 2, async_refresh=True, **RETRIED)
    run_both(a, b, range(4))
    # the last refreshes are under way
    assert [one.optimizer.counters["refreshes_retried"] for one in (a, b)] == [12, 8]
    assert not same_state(*a, *b)
    assert_same_at_the_end(a, b)


@pytest.mark.parametrize("puts_off", [False, True])
@pytest.mark.parametrize("kind", ["soap", "kl_soap"])
@pytest.mark.parametrize("how", ["state_dict", "pickle", "pieces"])
@pytest.mark.usefixtures("cholesky_qr_breaks")
def test_what_is_under_way_is_in_a_saved_state(kind: str, how: str, puts_off: bool) -> None:
    a = run_of(kind, async_refresh=True, **RETRIED)
    if puts_off:
        a.optimizer.defer_refreshes()
    a.steps(range(5))
    b = run_of(kind, async_refresh=True, **RETRIED)
    b.steps(range(2))  # a refresh under way must not change what is loaded
    assert all(one.optimizer._pending.waiting or one.optimizer._pending.launched for one in (a, b))
    for p, q in zip(a.params, b.params, strict=True):
        q.data.copy_(p.data)
    if how == "pieces":
        numbers = [{id(p): i for i, p in enumerate(one.params)} for one in (a, b)]
        pieces = {
            (numbers[0][id(p)], piece.name): piece.value for p, piece in a.optimizer.state_pieces()
        }
        for p, piece in b.optimizer.state_pieces():
            piece.value.copy_(pieces[numbers[1][id(p)], piece.name])
    else:
        saved = a.optimizer if how == "state_dict" else pickle.loads(pickle.dumps(a.optimizer))
        b.optimizer.load_state_dict(saved.state_dict())
    assert not a.optimizer._pending.waiting
    assert not a.optimizer._pending.launched
    assert same_state(*a, *b)
    run_both(a, b, range(5, 8))
    assert all_same(a.params, b.params)


def test_streams_of_the_update_and_of_the_refresh_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        device = cuda = torch.device("cuda")

        def __init__(self, device: torch.device) -> None: ...

        def wait_stream(self, other: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    own: streams.SideStreams = {}
    with streams.beside(own, [], Stream.cuda):
        pass
    assert list(streams.on_streams(range(5), own, 3, Stream.cuda)) == list(range(5))
    assert len({id(stream) for stream in own.values()}) == 4
    streams.join(own)


def test_each_device_has_streams_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a model moves to another GPU, the work on both is waited for."""
    waited = list[tuple[str, torch.device, torch.device]]()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def wait_stream(self, other: "Stream") -> None:
            waited.append(("stream", self.device, other.device))

        def synchronize(self) -> None:
            waited.append(("host", self.device, self.device))

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    own: streams.SideStreams = {}
    devices = [torch.device("cuda", number) for number in (0, 1, 0)]
    for device in devices:
        for number in (streams.BESIDE, visits.WRITING):
            assert streams.after_the_caller(own, number, device).device == device
    assert len(own) == 4
    waited.clear()
    streams.join(own)
    visits.wait_for_host(own)
    assert waited == [(by, x, x) for by in ("stream", "host") for x in devices[:2]]


def test_a_step_that_raises_keeps_the_bases_of_the_one_before() -> None:
    a, b = run_of("soap"), run_of("soap", async_refresh=True)
    for one in (a, b):
        one.steps(range(4))
        one.params[0].grad = torch.full_like(one.params[0], torch.nan)
        with pytest.raises(ValueError, match="not finite"):
            one.optimizer.step()
        one.steps(range(4, 7))
    assert all_same(a.params, b.params)
