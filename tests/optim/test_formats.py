"""State in 8 bits: bytes, bits after a resume, conversion between dtypes, and what stays as it
is."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optim_helpers import (
    Run,
    all_same,
    assert_same,
    give_gradients,
    run_both,
    run_of,
    through_a_file,
    whole,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from in_turn import in_turn
from lather.boxes import Piece
from lather.checkpoint.state import TrainingState
from lather.kernels.quantized import BASIS, POSITIVE, SIGNED, dequantize
from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer, Muon, SOAPMuon, state_bytes
from lather.optim.batched import formats
from lather.optim.options import Rate
from lather.optim.rule import Entry, Matrix, RefreshingRule, Rule, State

INT8 = torch.int8
SHAPES = [(64, 96), (64, 96), (2, 64, 64), (9,), (6, 4)]
PARTS: list[Any] = [
    INT8,
    {"moments": INT8},
    {"bases": INT8},
    {"factors": INT8},
    {"factors": torch.int16},
    {"factors": torch.bfloat16, "moments": torch.bfloat16},
]
KINDS = ("soap", "kl_soap_per_expert", "stacked_soap", "muon", "soap_muon", "adamw", "lion")


def made(kind: str, **options: Any) -> Run:
    return run_of(kind, SHAPES, precondition_frequency=2, **options)


def resumed(a: Run, kind: str, **options: Any) -> Run:
    """Make a second optimizer that goes on from the weights and the saved state of the first."""
    b = made(kind, **options)
    for p, q in zip(a.params, b.params, strict=True):
        q.data.copy_(p.data)
    b.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
    return b


def decoded(a: Run) -> dict[str, Tensor]:
    """Return the entries of the first parameter's state as a rule sees them."""
    of_state, state = a.optimizer.formats()[a.params[0]], a.state(0)
    return {name: x.decode(state, torch.float32).clone() for name, x in of_state.items()}


@pytest.mark.parametrize(
    ("cls", "limit"), [(SOAP, 9.0), (KLSOAP, 9.0), (SOAPMuon, 4.0), (Muon, 1.1), (AdamW, 2.1)]
)
def test_bytes_per_weight(cls: type[MatrixOptimizer], limit: float) -> None:
    """The goals of 8-bit state, for 768 x 2048."""
    options: dict[str, Any] = {"lr": 1e-3, "state_dtype": INT8}
    assert state_bytes((768, 2048), cls, **options) / (768 * 2048) <= limit


def test_bytes_are_those_of_codes_scales_and_triangles() -> None:
    m, n, block = 96, 200, formats.BLOCK
    blocks = -(-n // block)
    moment = m * n + 4 * m * blocks
    assert state_bytes((m, n), Muon, state_dtype=INT8) == moment + 4
    bases = m * m + 4 * m * -(-m // block) + n * n + 4 * n * blocks
    factors = (m * (m + 1) + n * (n + 1)) // 2
    in_16_bits = 2 * factors + 4 * (m + n)
    assert state_bytes((m, n), SOAP, state_dtype=INT8) == 2 * moment + bases + in_16_bits + 4
    narrow = {"factors": INT8, "bases": torch.float32, "moments": torch.float32}
    packed = factors + 4 * ((m + 1) * 1 + (n + 1) * 1)
    expected = 4 * (2 * m * n + m * m + n * n) + packed + 4
    assert state_bytes((m, n), SOAP, state_dtype=narrow) == expected
    for shape in ((63, 65), (4096,), (128, 4, 8, 8)):
        options: dict[str, Any] = {"lr": 1e-3, "matrix_layout": "tensor"}
        assert state_bytes(shape, AdamW, **options, state_dtype=INT8) == 8 * math.prod(shape) + 4


@pytest.mark.parametrize(("kind", "state_dtype"), in_turn(KINDS, PARTS, each=2), ids=str)
def test_a_resumed_run_has_the_same_bits(kind: str, state_dtype: Any) -> None:
    a = made(kind, state_dtype=state_dtype)
    a.steps(range(5))
    b = resumed(a, kind, state_dtype=state_dtype)
    assert_same(a, b)
    run_both(a, b, range(5, 9))
    assert_same(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_small_entries_and_vectors_have_the_bits_of_fp32(kind: str) -> None:
    a, b = made(kind, state_dtype=INT8), made(kind)
    run_both(a, b, range(5))
    assert all_same(a.params[3:], b.params[3:])
    assert not all_same(a.params[:1], b.params[:1])


@pytest.mark.parametrize(
    ("kind", "state_dtype"),
    [
        *((kind, INT8) for kind in ("stacked_soap", "muon", "soap_muon", "adamw", "lion")),
        ("soap", {"moments": INT8}),
    ],
    ids=str,
)
def test_updates_stay_near_those_of_fp32(kind: str, state_dtype: Any) -> None:
    """Rounded factors have other eigenvectors where eigenvalues are close, as those of random
    gradients are."""
    a, b, start = (made(kind, state_dtype=x, weight_decay=0.0) for x in (state_dtype, None, None))
    run_both(a, b, range(6))
    for p, q, origin in zip(a.params, b.params, start.params, strict=True):
        assert (p - q).norm() <= 0.25 * (q - origin).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_state_dtype_converts_the_state(kind: str) -> None:
    """fp32 to int8 loses at most half a code; back from int8 nothing."""
    a, b = made(kind), made(kind)
    run_both(a, b, range(4))
    before = [whole({k: x.clone() for k, x in a.state(i).items()}) for i in range(len(SHAPES))]
    for state_dtype in (INT8, torch.float32):
        for group in a.groups:
            group["state_dtype"] = state_dtype
        a.optimizer.state_dict()
        give_gradients(a.params, 4)
        a.optimizer._collect(None, 1.0)
    for i, old in enumerate(before):
        new = whole(a.state(i))
        assert new.keys() == old.keys()
        for name, x in old.items():
            if name != "step":
                assert (new[name] - x).abs().max() <= 2**-5 * x.abs().max(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [(None, INT8), (INT8, torch.float32), (INT8, {"bases": INT8})])
def test_a_saved_state_is_converted_when_it_is_loaded(
    kind: str, way: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    saved, own = way
    a, b = made(kind, state_dtype=saved), made(kind, state_dtype=own)
    a.steps(range(4))
    with caplog.at_level(logging.WARNING):
        b.optimizer.load_state_dict(a.optimizer.state_dict())
    (message,) = [record.message for record in caplog.records]
    assert re.match("the saved state of [34] parameters was converted to the state_dtype", message)
    assert {str(group["state_dtype"]) for group in b.groups} == {str(own)}
    b.steps(range(4, 6))
    with caplog.at_level(logging.WARNING):
        again = resumed(a, kind, state_dtype=None)
    assert_same(a, again)
    assert len(caplog.records) == 1


def test_muons_and_adams_states_become_codes() -> None:
    p, q = (nn.Parameter(torch.randn(64, 96)) for _ in range(2))
    theirs = torch.optim.AdamW([p], lr=1e-3)
    p.grad = torch.randn(64, 96)
    theirs.step()
    ours = AdamW([q], lr=1e-3, state_dtype=INT8)
    ours.load_state_dict(theirs.state_dict())
    wide = AdamW([nn.Parameter(q.detach().clone())], lr=1e-3)
    wide.load_state_dict(ours.state_dict() | {"param_groups": wide.state_dict()["param_groups"]})
    for name in ("exp_avg", "exp_avg_sq"):
        x, y = theirs.state[p][name], next(iter(wide.state.values()))[name]
        assert (x - y).abs().max() <= 2**-5 * x.abs().max()


def test_each_part_has_its_code() -> None:
    a, b = made("soap"), made("soap", state_dtype=dict.fromkeys(("moments", "bases"), INT8))
    a.steps(range(4))
    b.optimizer.load_state_dict(a.optimizer.state_dict())
    codes = {"exp_avg": SIGNED, "exp_avg_sq": POSITIVE, "basis_0": BASIS}
    for name, code in codes.items():
        x, y = a.state(0)[name], b.state(0)[f"{name}_codes"]
        decoded_x = dequantize(y.view(INT8), b.state(0)[f"{name}_scale"], code=code)
        assert y.dtype == (torch.uint8 if code is POSITIVE else INT8)
        assert (decoded_x - x).norm() <= 0.03 * x.norm(), name


@pytest.mark.parametrize("kind", ["soap_per_expert", "kl_soap_per_expert", "soap_muon_per_expert"])
@pytest.mark.parametrize(
    "state_dtype", [INT8, dict.fromkeys(("moments", "bases", "factors"), INT8)]
)
def test_idle_experts_keep_every_bit(kind: str, state_dtype: Any) -> None:
    a = run_of(kind, [(3, 64, 64)], precondition_frequency=1, state_dtype=state_dtype)
    a.steps(range(3))
    before = decoded(a)
    give_gradients(a.params, 3)
    a.params[0].grad[1] = 0
    a.optimizer.step()
    after = decoded(a)
    for name, x in before.items():
        if name.startswith(("factor", "basis", "eigenvalues")):
            assert torch.equal(after[name][1], x[1]), name
            assert not torch.equal(after[name][0], x[0]), name


@dataclass(frozen=True)
class Restless(RefreshingRule):
    """Changes an entry of each kind in each phase."""

    lr: Rate = 1.0

    def dims(self, matrix: Matrix) -> tuple[int, ...]:
        return (0,)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        kinds: Any = ("moment", "basis", "factor", "statistic")
        return {kind: Entry((64, 64), kind, initial=1.0) for kind in kinds}

    def statistics(self, g: Tensor, s: State, t: int) -> None:
        for x in map(s.__getitem__, s):
            x.mul_(2)

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        self.statistics(g, s, t)
        return g

    def refresh(self, s: State, dim: int, method: str, first: bool) -> None:
        self.statistics(s["moment"], s, 0)


@pytest.mark.parametrize("num_parameters", [1, 3])
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, INT8], ids=str)
def test_what_a_rule_writes_in_place_is_stored_whatever_its_kind(
    state_dtype: Any, num_parameters: int
) -> None:
    params = [nn.Parameter(torch.ones(64, 64)) for _ in range(num_parameters)]
    a = Run(MatrixOptimizer(params, Restless(state_dtype=state_dtype)), params)
    a.steps(range(3))
    num_refreshes = a.optimizer.counters["refreshes_done"] // num_parameters
    assert num_refreshes
    for name, x in decoded(a).items():
        assert torch.equal(x, torch.full_like(x, 4.0**3 * 2.0**num_refreshes)), name


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["exp_avg", "factor_1"])
def test_a_saved_state_that_is_not_finite_never_becomes_codes(name: str, bad: float) -> None:
    a, own = made("soap"), dict.fromkeys(("moments", "factors"), INT8)
    a.steps(range(2))
    saved = a.optimizer.state_dict()
    saved["state"][1][name][3, 5] = bad
    b = made("soap", state_dtype=own)
    message = rf"^{name} in the saved state of parameter 1 with shape \(64, 96\) has an infinity"
    with pytest.raises(ValueError, match=message):
        b.optimizer.load_state_dict(saved)
    made("soap").optimizer.load_state_dict(saved)
    form = b.optimizer.formats()[b.params[1]][name]
    theirs = saved["state"][1][name]
    pieces = {
        key: Piece(f"optim.w.{key}", torch.empty(x.shape, dtype=x.dtype), (0, 0), x.shape)
        for key, x in form.stored.items()
    }

    def read_into(out: Tensor, _: str, offset: Any) -> None:
        out.copy_(theirs)

    def dtype_of(name: str) -> torch.dtype | None:
        return None if name.endswith("_codes") else theirs.dtype

    with pytest.raises(ValueError, match=rf"^the saved entry optim\.w\.{name} has an infinity"):
        form.read(pieces, dtype_of, read_into)


def test_codes_without_scales_are_refused() -> None:
    a = made("muon", state_dtype=INT8)
    a.steps(range(2))
    saved = a.optimizer.state_dict()
    del saved["state"][0]["momentum_buffer_scale"]
    with pytest.raises(ValueError, match="momentum_buffer_scale missing"):
        made("muon", state_dtype=INT8).optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("theirs", "own", "missing"),
    [
        (INT8, None, r"momentum_buffer\b"),
        (INT8, torch.float32, r"momentum_buffer\b"),
        (None, INT8, "momentum_buffer_codes"),
    ],
    ids=str,
)
def test_distributed_checkpoints_never_take_codes_for_numbers(
    theirs: Any, own: Any, missing: str, tmp_path: Path
) -> None:
    """DCP copies what has the same name, in any dtype, into the tensors that are there."""

    def state_of(state_dtype: Any) -> dict[str, Any]:
        model = nn.Linear(96, 64, bias=False)
        optimizer = Muon(model.parameters(), lr=1e-2, state_dtype=state_dtype)
        give_gradients(list(model.parameters()), 0)
        optimizer.step()
        return {"optimizer": get_optimizer_state_dict(model, optimizer)}

    saved = state_of(theirs)
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match=missing):
        dcp.load(state_of(own), checkpoint_id=tmp_path, no_dist=True)
    room = state_of(theirs)
    dcp.load(room, checkpoint_id=tmp_path, no_dist=True)
    for key, x in saved["optimizer"]["state"]["weight"].items():
        assert torch.equal(room["optimizer"]["state"]["weight"][key], x), key


@pytest.mark.parametrize("end", ["codes", "scale"])
def test_entries_whose_stored_tensors_would_share_a_name_are_refused(end: str) -> None:
    @dataclass(frozen=True)
    class TwoMoments(Rule):
        def state(self, matrix: Matrix) -> dict[str, Entry]:
            return {"m": Entry(matrix.shape, "moment"), f"m_{end}": Entry(())}

    p = [nn.Parameter(torch.zeros(64, 96))]
    MatrixOptimizer(p, TwoMoments(lr=1e-3))
    message = f"'m' and 'm_{end}' of the rule .* would both be stored as 'm_{end}'.*rename"
    with pytest.raises(ValueError, match=message):
        MatrixOptimizer(p, TwoMoments(lr=1e-3, state_dtype=INT8))


@pytest.mark.parametrize(("start", "length"), [(0, 300), (100, 56), (128, 172), (250, 50)])
def test_pieces_that_begin_inside_a_block_are_read_with_their_scales(
    start: int, length: int
) -> None:
    entry = Entry((32, 300), "moment")
    coded = formats.EntryFormat.of("m", entry, INT8)
    wide = formats.EntryFormat.of("m", entry, torch.float32)
    x = torch.randn(1, 32, 300) * torch.logspace(-3, 3, 300)
    stored = {key: y[0] for key, y in coded.allocate(1, x.device).items()}
    coded.encode(x[0], stored)

    def read_into(target: Tensor, name: str, offset: Sequence[int]) -> None:
        whole = stored[name.removeprefix("p/")]
        rows, columns = (slice(o, o + n) for o, n in zip(offset, target.shape, strict=True))
        target.copy_(whole[rows, columns])

    piece = Piece("p/m", torch.zeros(32, length), (0, start), (32, 300))
    wide.read({"m": piece}, lambda name: getattr(stored.get(name[2:]), "dtype", None), read_into)
    expected = coded.decode(stored, torch.float32)[:, start : start + length]
    assert torch.equal(piece.value, expected)


@pytest.mark.parametrize("theirs", [torch.float32, torch.bfloat16, INT8, torch.int16], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.int16], ids=str)
@pytest.mark.parametrize("n", [64, 65])
def test_ranks_read_their_rows_of_factors_in_any_format(
    theirs: torch.dtype, own: torch.dtype, n: int
) -> None:
    """Rows of the codes and of the diagonal are divided among ranks each by itself."""
    g = torch.randn(2, n, 2 * n)
    entry = Entry((n, n), "factor")
    saved, form = (formats.EntryFormat.of("factor_0", entry, x) for x in (theirs, own))
    stored = {key: torch.empty(2, *x.shape, dtype=x.dtype) for key, x in saved.stored.items()}
    saved.encode(g @ g.mT, stored)

    def read_into(target: Tensor, name: str, offset: Sequence[int]) -> None:
        whole = stored[name.removeprefix("p/")]
        target.copy_(
            whole[tuple(slice(o, o + k) for o, k in zip(offset, target.shape, strict=True))]
        )

    whole = {key: torch.empty(2, *x.shape, dtype=x.dtype) for key, x in form.stored.items()}
    for expert in range(2):
        for rank in range(4):
            pieces = {}
            for key, x in whole.items():
                parts = x[expert : expert + 1].chunk(4, dim=1)
                part = parts[rank] if rank < len(parts) else parts[0][:, :0]
                start = sum(part.shape[1] for part in parts[:rank])
                offset = (expert, start, *(0 for _ in x.shape[2:]))
                pieces[key] = Piece(f"p/{key}", part, offset, tuple(x.shape))
            form.read(pieces, lambda name: getattr(stored.get(name[2:]), "dtype", None), read_into)
    expected = saved.decode(stored, torch.float32)
    found = form.decode(whole, torch.float32)
    if own == theirs:
        assert torch.equal(found, expected)
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= 1e-4 < (1.01 * found - expected).abs().max() / expected.abs().max()


def test_an_infinity_between_two_steps_raises_nothing_that_only_one_rank_would_see() -> None:
    """A rank owns some matrices; if it alone stopped, the others would wait for it."""
    a = made("soap")
    a.steps(range(2))
    a.state(1)["factor_0"].fill_(torch.inf)
    a.state(1)["exp_avg"][0] = torch.inf
    for group in a.groups:
        group["state_dtype"] = "int8"
    a.steps(range(2, 4))
    assert {"factor_0_codes", "exp_avg_codes"} <= a.state(0).keys() & a.state(1).keys()
    assert all(x.isfinite().all() for x in decoded(a).values())


def test_nonnegative_factors_have_signed_codes() -> None:
    form = formats.EntryFormat.of("k", Entry((64, 64), "factor", nonnegative=True), INT8)
    (codes, *_) = form.stored.values()
    assert codes.dtype == INT8
    assert form.in_state(form.allocate(1, torch.device("cpu"))) == form


@pytest.mark.parametrize("own", [INT8, torch.float32], ids=str)
def test_codes_at_odd_addresses_are_read(own: Any) -> None:
    """A state belongs to the user between two steps, who may move its bytes."""

    def moved(x: Tensor) -> Tensor:
        memory = torch.empty(x.numel() + 1, dtype=torch.uint8)
        memory[1:] = x.flatten()
        return memory[1:].view(x.shape)

    a, b = made("soap", state_dtype=INT8), made("soap", state_dtype=INT8)
    run_both(a, b, range(3))
    for entries in b.optimizer.state.values():
        for x in entries.values():
            if x.dtype == torch.uint8:
                x.data = moved(x)
    for group in (*a.groups, *b.groups):
        group["state_dtype"] = own
    run_both(a, b, range(3, 6))
    assert_same(a, b)


@pytest.mark.parametrize("shape", [(64, 64, 8), (65, 64, 8), (128, 128, 16)], ids=str)
@pytest.mark.parametrize("layout", ["stacked", "tensor", "per_expert"])
def test_checkpoints_keep_codes_and_diagonal_together(shape: tuple[int, ...], layout: str) -> None:
    """The rows of one of them may be as many as the experts."""
    model = nn.Module()
    model.experts = nn.ParameterDict({"w": nn.Parameter(torch.randn(shape))})
    options: dict[str, Any] = {"matrix_layout": layout, "state_dtype": INT8}
    optimizer = SOAP(model.parameters(), lr=1e-2, **options)
    give_gradients(list(model.parameters()), 0)
    optimizer.step()
    training = TrainingState.of_model(model, optimizer)
    saved = {piece.name: piece.value.clone() for piece in training.optimizer_state()}
    before = {key: x.clone() for key, x in optimizer.state[model.experts["w"]].items()}
    optimizer.state.clear()
    optimizer.init_state()

    def read_into(target: Tensor, name: str, offset: Any) -> None:
        target.copy_(saved[name])

    for of_entry, pieces in training.optimizer_entries():
        for form in of_entry.values():
            if form.key in pieces:
                form.read(pieces, lambda name: getattr(saved.get(name), "dtype", None), read_into)
    after = optimizer.state[model.experts["w"]]
    assert any(key.endswith("_diagonal") for key in before)
    for key in before.keys() - {"step"}:
        assert torch.equal(after[key], before[key]), key
