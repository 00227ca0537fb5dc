"""`offload`: state in the host's memory visits the device, and a step is the same as without; on a
pretended boundary, where an uncertain order of copies is an error."""

import copy
from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_KINDS,
    KINDS,
    WITH_EXPERTS,
    Run,
    all_same,
    assert_same,
    few_kinds,
    give_gradients,
    parameter,
    parameters,
    run_both,
    run_of,
    snapshot,
    through_a_file,
)
from pretended_boundary import Stream, UnorderedError, crossing
from strangers import Shampoo
from torch import Tensor

from in_turn import in_turn
from lather.optim import KLSOAP, SOAP, MatrixOptimizer, Muon, State
from lather.optim.batched import formats, pinned, visits
from lather.optim.linalg import eigenbasis

ONE_BY_ONE: dict[str, Any] = {"bucket_bytes": 2000}
"""Chunks of one matrix, or of some elements, so that many visit the device in a step."""

SHAPES = (*((6, 4),) * 5, (3, 4, 5), (5,), ())


def pair(kind: Any, shapes: Any = SHAPES, **options: Any) -> tuple[Run, Run]:
    """Return a run and the same run with offloaded state."""
    return run_of(kind, shapes, **options), run_of(kind, shapes, offload=True, **options)


def read(run: Run) -> list[Tensor]:
    """Read all weights and state, as somebody may after `state_dict`."""
    run.optimizer.state_dict()
    return snapshot(run.optimizer, run.params)


@pytest.mark.parametrize(
    "kind",
    [
        *FEW_KINDS,
        "adamw",
        *(
            pytest.param(kind, marks=pytest.mark.grid)
            for kind in sorted({*KINDS} - {*FEW_KINDS, "adamw"})
        ),
    ],
)
def test_a_step_has_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair(kind, **ONE_BY_ONE)
    a.steps(range(5))
    with crossing(monkeypatch) as boundary:
        b.steps(range(5))
        assert all_same(read(a), read(b))
    assert boundary.fetched >= boundary.written > 0
    assert_same(a, b)
    assert a.optimizer.counters == b.optimizer.counters


@pytest.mark.parametrize(
    "options",
    [
        {"stagger_refresh": True, "stagger_first": True},
        {"use_adaptive_criteria": True, "adaptive_update_tolerance": 0.3},
        {"refresh_method": "eigh"},
        {"state_dtype": torch.bfloat16, "betas": (0.9, 0.9)},
        {"weight_decay_method": "l2", "weight_decay": 0.1, "keep_norm": False},
        {"cautious_decay": True, "weight_decay": 0.1, "row_floor": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["soap_per_expert", "kl_soap_per_expert"])
def test_options_of_refreshes_and_state_have_the_same_bits(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of several matrices, and with buckets that are one chunk."""
    a, b = pair(kind, **options, bucket_bytes=20_000)
    a.steps(range(7))
    with crossing(monkeypatch):
        b.steps(range(7))
        assert all_same(read(a), read(b))
    assert a.optimizer.counters == b.optimizer.counters


def test_refreshes_that_fail_are_tried_again_while_the_rows_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(rows: Tensor, method: str) -> tuple[Tensor, Tensor]:
        out, failed = real(rows, method)
        return out, failed | (method == "cholesky_qr")

    real = eigenbasis.orthonormal_rows
    monkeypatch.setattr(eigenbasis, "orthonormal_rows", breaks)
    a, b = pair("soap_per_expert", refresh_method="cholesky_qr", **ONE_BY_ONE)
    a.steps(range(4))
    with crossing(monkeypatch):
        b.steps(range(4))
        assert all_same(read(a), read(b))
    assert a.optimizer.counters == b.optimizer.counters
    assert b.optimizer.counters["refreshes_retried"] > 0


@pytest.mark.parametrize("rounding", ["stochastic", "remainder"])
@pytest.mark.parametrize("kind", ["soap_muon", "adamw"])
def test_bf16_weights_have_the_same_bits(
    kind: str, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dtype": torch.bfloat16, "weight_rounding": rounding}
    a, b = pair(kind, **options, **ONE_BY_ONE)
    a.steps(range(4))
    with crossing(monkeypatch):
        b.steps(range(4))
        assert all_same(read(a), read(b))


@pytest.mark.parametrize(
    ("kind", "state_dtype"),
    in_turn(["adamw", "soap", "muon", "lion"], [torch.int8, {"moments": torch.int8}]),
    ids=str,
)
def test_state_in_8_bits_has_the_same_bits(
    kind: str, state_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rest under AdamW, whose kernel takes the vectors, and rows of codes beside them;
    through a resume, too."""
    monkeypatch.setattr(formats, "MIN_CODED", 16)

    def made(*, offload: bool) -> Run:
        shapes = [*SHAPES, (8, 6), (8, 6)]
        run = run_of(kind, shapes, offload=offload, state_dtype=state_dtype, **ONE_BY_ONE)
        rest = {**run.groups[0], "params": run.groups[0]["params"][-2:], "rule": "adamw"}
        run.groups[0]["params"] = run.groups[0]["params"][:-2]
        run.optimizer.add_param_group(rest)
        return run

    def resumed(run: Run) -> Run:
        new = made(offload=run.groups[0]["offload"])
        new.optimizer.load_state_dict(through_a_file(run.optimizer.state_dict()))
        for p, q in zip(run.params, new.params, strict=True):
            q.data.copy_(p.detach())
        return new

    a = made(offload=False)
    a.steps(range(5))
    c = resumed(a)
    c.steps(range(5, 9))
    with crossing(monkeypatch):
        b = made(offload=True)
        b.steps(range(5))
        assert all_same(read(a), read(b))
        b = resumed(b)
        b.steps(range(5, 9))
        assert all_same(read(c), read(b))
        a.steps(range(5, 9))
        assert all_same(read(a), read(b))
    coded = {torch.int8, torch.uint8}
    assert coded & {x.dtype for x in a.optimizer.state[a.params[-1]].values()}


@pytest.mark.parametrize(
    "kind",
    [*WITH_EXPERTS[2:4], *(pytest.param(x, marks=pytest.mark.grid) for x in WITH_EXPERTS[4:])],
)
def test_experts_without_tokens_keep_their_statistics(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair(kind, **ONE_BY_ONE)
    with crossing(monkeypatch):
        for step in range(5):
            for run in (a, b):
                give_gradients(run.params, step)
                grad = run.params[5].grad
                assert grad is not None
                grad[step % 3] = 0
                run.optimizer.step()
        assert all_same(read(a), read(b))


def test_a_gradient_that_is_not_finite_leaves_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair("soap", nonfinite="skip", **ONE_BY_ONE)
    with crossing(monkeypatch):
        for step in range(4):
            for run in (a, b):
                give_gradients(run.params, step)
                grad = run.params[step].grad
                assert grad is not None
                grad.view(-1)[0] = torch.inf
                run.optimizer.step()
        assert all_same(read(a), read(b))
    assert b.optimizer.counters["nonfinite_skipped"] == 4


class Impatient(Shampoo):
    """Shampoo that changes its roots in every phase: in place, or by others in their place."""

    def statistics(self, g: Tensor, s: State, t: int) -> None:
        super().statistics(g, s, t)
        for root in s.by_dim("root").values():
            root.mul_(0.9)

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        u = super().update(g, s, t)
        if "root_1" in s:
            s["root_1"] = s["root_1"] * 0.8
        return u


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, torch.int8], ids=str)
def test_bases_that_a_rule_changes_outside_of_refresh_are_written_back(
    state_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MIN_CODED", 16)
    a, b = (
        Run(MatrixOptimizer(params := parameters(SHAPES), rule), params)
        for rule in (
            Impatient(1e-2, precondition_frequency=3, state_dtype=state_dtype, **options)
            for options in (ONE_BY_ONE, {**ONE_BY_ONE, "offload": True})
        )
    )
    a.steps(range(5))
    with crossing(monkeypatch):
        b.steps(range(5))
        assert all_same(read(a), read(b))
    assert a.optimizer.counters["refreshes_done"] == 2 * 10  # in steps 1 and 3


class Silent(Shampoo):
    """Shampoo whose refresh changes roots as a kernel does that does not tell torch."""

    def refresh(self, s: State, dim: int, method: str, first: bool) -> None:
        s[f"root_{dim}"].data.mul_(0.5)


def test_refreshed_bases_are_written_back_if_torch_counts_no_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params, rule = [parameter(6, 4)], Silent(1e-2, precondition_frequency=2, offload=True)
    run = Run(MatrixOptimizer(params, rule), params)
    with crossing(monkeypatch):
        run.steps(range(4))
        read(run)
        assert torch.equal(run.state(0)["root_1"], torch.eye(4) / 2**3)  # after steps 1, 2 and 4


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"), [(SOAP, {"precondition_frequency": 4}), (KLSOAP, {}), (Muon, {})], ids=str
)
def test_a_row_travels_once_in_each_direction(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bases are written only where they were refreshed."""
    run = run_of(kind, [(6, 4)] * 3, offload=True, **options)
    of_bases = 3 * 4 * (36 + 16) if kind is not Muon else 0
    with crossing(monkeypatch) as boundary:
        num_due = []
        for step in range(12):
            boundary.fetched = boundary.written = 0
            done = run.optimizer.counters["refreshes_done"]
            run.steps([step])
            state = [x for p in run.params for x in run.optimizer.state[p].values() if x.dim()]
            everything = sum(x.nbytes for x in state)
            num_due.append(run.optimizer.counters["refreshes_done"] > done)
            assert boundary.fetched == everything
            assert boundary.written == everything - (0 if num_due[-1] else of_bases)
    assert kind is Muon or 0 < sum(num_due) < 12


def test_temporaries_are_bounded_by_bucket_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 30_000
    run = run_of("soap", [(8, 8)] * 40, offload=True, bucket_bytes=limit)
    sizes = list[int]()
    start = visits.Visits.__init__

    def started(self: visits.Visits, *arguments: Any) -> None:
        start(self, *arguments)
        sizes.append(sum(len(room.memory) for room in self._rooms))

    with crossing(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(visits.Visits, "__init__", started)
        run.steps(range(2))
    of_a_matrix = 6 * 64 * 4
    assert 3 * of_a_matrix <= sizes[0] <= limit


@pytest.mark.parametrize(
    "sizes",
    [[300], [1000, 24, 5000, 512], [2**20, 3, 2**19 + 1, 2**18], [513] * 100, [2**21, 100]],
    ids=lambda sizes: f"{len(sizes)} stacks",
)
def test_pinned_blocks_are_powers_of_two_of_which_little_is_left(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = list[int]()

    def allocate(size: int) -> Tensor:
        blocks.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(pinned, "pinned", allocate)
    monkeypatch.setattr(pinned, "LARGEST_BLOCK", 2**20)
    total = sum(map(pinned.padded, sizes))
    host = pinned.PinnedMemory(total)
    for number, size in enumerate(sizes):
        host.stack((size,), torch.uint8).fill_(number + 1)
    assert all(size & (size - 1) == 0 for size in blocks)
    assert total <= sum(blocks) <= 2 * total + 512


# --- what must be in order, and what must stay whole ----------------------------------------------


@pytest.mark.parametrize("method", ["wait_event", "wait_stream", "synchronize"])
def test_a_missing_wait_is_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("soap", [(6, 4)] * 2, offload=True)
    monkeypatch.setattr(Stream, method, lambda *_: None)

    def steps() -> list[Tensor]:
        run.steps(range(3))
        return read(run)

    with crossing(monkeypatch), pytest.raises(UnorderedError):
        steps()


@pytest.mark.parametrize("where", ["update", "refresh", "statistics"])
def test_a_step_that_raises_leaves_the_chunk_as_it_was(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks before it have taken their step, as without offload; the next steps go on."""
    run = run_of(KLSOAP, [(6, 4)] * 6, offload=True, precondition_frequency=1, **ONE_BY_ONE)
    rule = type(run.optimizer).rule
    with crossing(monkeypatch):
        run.steps(range(2))
        before, real, calls = read(run), getattr(rule, where), []

        def fails(*arguments: Any, **options: Any) -> Any:
            calls.append(where)
            result = real(*arguments, **options)
            if len(calls) == 7 - 4 * (where != "refresh"):  # in the third or fourth chunk
                raise RuntimeError("out of memory")
            return result

        with monkeypatch.context() as patch:
            patch.setattr(rule, where, fails)
            with pytest.raises(RuntimeError, match="out of memory"):
                run.steps([2])
        after = read(run)
        num = len(run.optimizer.state[run.params[0]])
        same = [
            all(torch.equal(x, y) for x, y in zip(before[i:j], after[i:j], strict=True))
            for i, j in ((6 + n * num + 1, 6 + (n + 1) * num) for n in range(6))
        ]
        moved = 6 - sum(same)
        assert same == [False] * moved + [True] * (6 - moved)
        assert 0 < moved < 6
        run.steps(range(3, 5))
        assert all(x.isfinite().all() for x in read(run))


# --- state ----------------------------------------------------------------------------------------


@few_kinds
def test_checkpoints_fit_with_and_without(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without offload goes on with it, and back."""
    a, b, c = run_of(kind), run_of(kind, offload=True), run_of(kind)
    a.steps(range(3))
    with crossing(monkeypatch):
        b.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
        assert all(group["offload"] for group in b.groups)
        for p, q in zip(a.params, b.params, strict=True):
            q.data.copy_(p.detach())
        run_both(a, b, range(3, 6))
        assert all_same(read(a), read(b))
        saved = through_a_file(b.optimizer.state_dict())
    c.optimizer.load_state_dict(saved)
    assert not any(group["offload"] for group in c.groups)
    for p, q in zip(b.params, c.params, strict=True):
        q.data.copy_(p.detach())
    run_both(a, c, range(6, 9))
    assert_same(a, c)


def test_a_saved_run_with_options_that_it_excludes_is_refused() -> None:
    a, b = pair("soap")
    for group in a.groups:
        group["async_refresh"] = True
    with pytest.raises(ValueError, match=r"^offload=True with async_refresh=True"):
        b.optimizer.load_state_dict(a.optimizer.state_dict())


def test_state_that_was_moved_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair("soap")
    with crossing(monkeypatch) as boundary:
        run_both(a, b, range(3))
        b.optimizer.state_dict()
        for state in b.optimizer.state.values():
            for name, x in state.items():
                if name != "step":
                    state[name] = x.clone()
        run_both(a, b, range(3, 5))
        assert all_same(read(a), read(b))
        for p in b.params:
            for name, x in b.optimizer.state[p].items():
                assert boundary.is_host(x) == (name != "step"), name


def test_copies_and_pieces_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("soap", [(6, 4)] * 2, offload=True)
    with crossing(monkeypatch):
        run.steps(range(2))
        assert all(
            piece.value.clone().isfinite().all() for _, piece in run.optimizer.state_pieces()
        )
        run.steps([2])
        copied = copy.deepcopy(run.optimizer)
        assert copied.state_dict()["state"].keys()


def test_it_may_differ_between_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(6, 4)] * 4
    a = run_of("soap", shapes)
    params = [parameter(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    groups = [{"params": params[:2], "offload": True}, {"params": params[2:]}]
    b = Run(SOAP(groups, lr=1e-2, precondition_frequency=2), params)
    with crossing(monkeypatch):
        run_both(a, b, range(4))
        assert all_same(read(a), read(b))


def test_on_a_cpu_it_changes_nothing() -> None:
    a, b = pair("soap")
    run_both(a, b, range(3))
    assert_same(a, b)
    assert not any(chunk for chunk in b.optimizer._plan.visitors)


@pytest.mark.parametrize(
    "options",
    [{"async_refresh": True}, {"num_streams": 2}, {"ownership": "replicated"}],
    ids=lambda options: next(iter(options)),
)
def test_what_it_excludes_is_refused_in_one_line(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"^offload=True with {name}={value!r}: .*set {name}="):
        SOAP([parameter(4, 4)], offload=True, **options)
