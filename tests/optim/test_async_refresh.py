"""`async_refresh`: the bases that are computed between two steps are there for the second, whatever
happens in between."""

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from optim_helpers import SOAP_KINDS, all_same, make, parameters, run, same_state
from torch import Tensor

from lather.optim import KLSOAP, SOAP
from lather.optim.batched import refresh
from lather.optim.batched import streams as precision
from lather.optim.linalg import eigenbasis
from lather.optim.rules.kl_soap import KLSOAPRule

UPDATE_FIRST = [
    *(kind for kind in SOAP_KINDS if kind.startswith("soap")),
    "soap_muon",
    "soap_muon_per_expert",
]
KL_KINDS = [kind for kind in SOAP_KINDS if not kind.startswith("soap")]


@pytest.mark.parametrize(
    "options",
    [{}, {"stagger_refresh": True}, {"use_adaptive_criteria": True}, {"refresh_method": "eigh"}],
    ids=str,
)
@pytest.mark.parametrize("kind", UPDATE_FIRST)
def test_soap_has_the_same_bits(kind: str, options: dict[str, Any]) -> None:
    params, others = parameters(), parameters()
    a, b = make(kind, params, **options), make(kind, others, async_refresh=True, **options)
    run(a, params, range(8))
    run(b, others, range(8))
    assert all_same(params, others)
    assert b.state_dict()  # afterwards nothing is under way
    assert same_state(a, params, b, others)
    assert a.counters == b.counters


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_the_kl_rules_refresh_after_the_update(
    kind: str, warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, others = parameters(), parameters()
    a = make(kind, params, adam_warmup_steps=warmup)
    monkeypatch.setattr(KLSOAPRule, "refreshes_first", False)
    run(a, params, range(8))
    monkeypatch.undo()
    b = make(kind, others, adam_warmup_steps=warmup, async_refresh=True)
    run(b, others, range(8))
    assert all_same(params, others)
    assert b.state_dict()
    assert same_state(a, params, b, others)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_adaptive_criteria": True}, {"second_moment": "rotate"}, {"refresh_method": "eigh"}],
    ids=str,
)
@pytest.mark.parametrize("kind", SOAP_KINDS)
def test_pieces_that_the_caller_does_between_two_steps_have_the_same_bits(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "CPU_REFRESH_BYTES", 1)  # so that a batch is one matrix and dim
    params, others = parameters(), parameters()
    a, b = (
        make(kind, params, async_refresh=True, **options),
        make(kind, others, async_refresh=True, **options),
    )
    refreshes, done = b.defer_refreshes(), []
    for step in range(8):
        run(a, params, [step])
        run(b, others, [step])
        done.append(min(step, len(refreshes)))
        # none after the first step, then more and more: the next step does the rest
        for _ in range(done[-1]):
            refreshes.work()
    assert sum(done) > 4
    assert all_same(params, others)
    b.state_dict()
    a.state_dict()
    assert not refreshes
    assert same_state(a, params, b, others)
    assert a.counters == b.counters


def test_pieces_run_under_the_settings_of_a_step() -> None:
    params, others = parameters(), parameters()
    a, b = make("soap", params, async_refresh=True), make("soap", others, async_refresh=True)
    refreshes = b.defer_refreshes()
    for step in range(4):
        run(a, params, [step])
        run(b, others, [step])
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            while refreshes:
                refreshes.work()
    a.state_dict()
    assert same_state(a, params, b, others)


def test_it_may_differ_per_group() -> None:
    params, others = parameters([(6, 4)] * 4), parameters([(6, 4)] * 4)
    a = KLSOAP([{"params": params[:2]}, {"params": params[2:], "async_refresh": True}], lr=1e-2)
    b, c = KLSOAP(others[:2], lr=1e-2), KLSOAP(others[2:], lr=1e-2, async_refresh=True)
    run(a, params, range(6))
    for step in range(6):
        run(b, others, [step])
        c.step()
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
    params, others = parameters([(6, 4)] * 2), parameters([(6, 4)] * 2)
    a, b = SOAP(params, **RETRIED), SOAP(others, async_refresh=True, **RETRIED)
    run(a, params, range(4))
    run(b, others, range(4))
    # the last refreshes are under way
    assert (a.counters["refreshes_retried"], b.counters["refreshes_retried"]) == (12, 8)
    assert not same_state(a, params, b, others)
    b.state_dict()
    assert same_state(a, params, b, others)
    assert a.counters == b.counters


@pytest.mark.parametrize("puts_off", [False, True])
@pytest.mark.parametrize("kind", ["soap", "kl_soap"])
@pytest.mark.parametrize("how", ["state_dict", "pickle", "pieces"])
@pytest.mark.usefixtures("cholesky_qr_breaks")
def test_what_is_under_way_is_in_a_saved_state(kind: str, how: str, puts_off: bool) -> None:
    params = parameters()
    a = make(kind, params, async_refresh=True, **RETRIED)
    if puts_off:
        a.defer_refreshes()
    run(a, params, range(5))
    assert a._pending.waiting or a._pending.launched
    others = copy.deepcopy(params)
    b = make(kind, others, async_refresh=True, **RETRIED)
    run(b, others, range(2))
    # a refresh under way must not change what is loaded
    assert b._pending.waiting or b._pending.launched
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    if how == "state_dict":
        b.load_state_dict(a.state_dict())
    elif how == "pickle":
        b.load_state_dict(pickle.loads(pickle.dumps(a)).state_dict())
    else:
        b.init_state()
        saved = {
            (i, piece.name): piece.value
            for i, p in enumerate(params)
            for param, piece in a.state_pieces()
            if param is p
        }
        for param, piece in b.state_pieces():
            piece.value.copy_(
                saved[next(i for i, p in enumerate(others) if p is param), piece.name]
            )
    assert not a._pending.waiting
    assert not a._pending.launched
    assert same_state(a, params, b, others)
    run(a, params, range(5, 8))
    run(b, others, range(5, 8))
    assert all_same(params, others)


def test_streams_of_the_update_and_of_the_refresh_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        device = cuda = torch.device("cuda")

        def wait_stream(self, other: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    streams: precision.SideStreams = {}
    with precision.beside(streams, [], Stream.cuda):
        pass
    assert list(precision.on_streams(range(5), streams, 3, Stream.cuda)) == list(range(5))
    assert len({id(stream) for stream in streams.values()}) == 4
    precision.join(streams)


def test_only_true_and_false() -> None:
    with pytest.raises(ValueError, match="async_refresh=1 is not valid: give True or False"):
        SOAP([{"params": parameters(), "async_refresh": 1}])


def test_a_step_that_raises_keeps_the_bases_of_the_one_before() -> None:
    params, others = parameters(), parameters()
    a, b = make("soap", params), make("soap", others, async_refresh=True)
    for opt, those in ((a, params), (b, others)):
        run(opt, those, range(4))
        those[0].grad = torch.full_like(those[0], torch.nan)
        with pytest.raises(ValueError, match="not finite"):
            opt.step()
        run(opt, those, range(4, 7))
    assert all_same(params, others)
