"""Attention of a context rank's plain slices by cuDNN's kernels, in whose place there is a softmax
in fp64: the pieces, results, what is saved; when it is chosen, from made-up answers and on the
stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lather.models import attention_kernels, piece_kernels, sliced_attention
from lather.models.attention_kernels import Recipe, attend
from lather.models.context import Context
from lather.models.fused_attention import Case, Operands
from lather.models.saving.recomputed import Recomputation
from lather.models.sliced_attention import cudnn_takes_slices
from lather.models.token_positions import SequenceLayout
from models.tiny import error, random_normal
from scripts import printed_by

CPU = torch.device("cpu")
B, T, H = 2, 24, 4
WIDTHS = {"plain": (H, 6, 6), "GQA": (2, 6, 6), "MLA": (H, 6, 3), "MQA": (1, 3, 5)}
"""Number of key-value heads, width of keys, width of values."""
RANKS = [(rank, size) for size in (2, 4) for rank in range(size)]

# --- cuDNN's kernels ------------------------------------------------------------------------------


def logits_of(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    logits = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    if is_causal:
        assert q.shape[2] == k.shape[2]
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:]).tril().bool(), -torch.inf)
    return logits


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float,
) -> tuple[Any, ...]:
    """Return what `_scaled_dot_product_cudnn_attention` does, computed in fp64."""
    assert compute_log_sumexp
    assert attn_bias is None
    assert not dropout_p
    assert not return_debug_mask
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    q, k, v = (x.double() for x in (query, key, value))
    logits = logits_of(q, k, is_causal, scale)
    y = logits.softmax(-1) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    sums = logits.logsumexp(-1, keepdim=True)
    sums = sums.to(torch.promote_types(query.dtype, torch.float32))
    lengths, seed = (query.shape[2], key.shape[2]), torch.zeros((), dtype=torch.int64)
    return y.to(query.dtype), sums, None, None, *lengths, seed, seed, None


def reference_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_scaled_dot_product_cudnn_attention_backward` does, computed in fp64."""
    _seed, _offset, attn_bias, cum_seq_q, cum_seq_k, *sizes, dropout_p, is_causal = rest
    assert attn_bias is cum_seq_q is cum_seq_k is None
    assert (*sizes, dropout_p) == (query.shape[2], key.shape[2], 0)
    assert logsumexp.is_contiguous()
    assert logsumexp.shape == (*query.shape[:3], 1)
    assert all(x.stride(-1) == 1 for x in (grad_out, query, key, value, out))
    assert grad_out.dtype == out.dtype == query.dtype
    grad, q, k, v, y = (x.double() for x in (grad_out, query, key, value, out))
    share = (logits_of(q, k, is_causal, scale) - logsumexp).exp()
    groups = (q.shape[1] // k.shape[1], -1)
    wide_k, wide_v = (x.repeat_interleave(groups[0], 1) for x in (k, v))
    slope = share * (grad @ wide_v.mT - (grad * y).sum(-1, keepdim=True)) * scale
    dk, dv = (
        x.unflatten(1, (k.shape[1], groups[0])).sum(2) for x in (slope.mT @ q, share.mT @ grad)
    )
    return (slope @ wide_k).to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend as a GPU does whose cuDNN takes all slices. Backward has ranges of a few keys."""
    monkeypatch.setattr(piece_kernels, "cudnn_attention", reference)
    monkeypatch.setattr(piece_kernels, "cudnn_attention_backward", reference_backward)
    monkeypatch.setattr(attention_kernels, "cudnn_takes_slices", lambda operands, starts: True)
    monkeypatch.setattr(sliced_attention, "MOST_BYTES", 2000)


# --- Results --------------------------------------------------------------------------------------


def operands(groups: int, width: int, value_width: int) -> list[Tensor]:
    shapes = [(B, T, H, width), (B, T, groups, width), (B, T, groups, value_width)]
    return [random_normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with a softmax over all earlier tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    wide_v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (logits_of(q, k, True, 0.3).softmax(-1) @ wide_v).transpose(1, 2)


def with_gradients(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, leaves, random_normal(*y.shape, seed=9).to(y))]


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_slices_have_the_outputs_and_gradients_of_whole_sequences(
    rank: int, size: int, widths: str
) -> None:
    context, (q, k, v) = Context(rank, size), operands(*WIDTHS[widths])
    layout = SequenceLayout(B, T, CPU, context=context)
    expected = with_gradients(context.local(causal(q, k, v)), [q, k, v])
    actual = with_gradients(attend(context.local(q), k, v, layout, scale=0.3), [q, k, v])
    for ours, plain in zip(actual, expected, strict=True):
        assert (ours - plain).abs().max() < 1e-12


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_bf16_rounds_no_more_than_the_kernels(rank: int, size: int) -> None:
    """An output of two pieces is rounded three times, and a sum of five gradients six times."""
    context, exact = Context(rank, size), operands(2, 6, 6)
    layout, results = SequenceLayout(B, T, CPU, context=context), []
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v = (x.detach().bfloat16().to(dtype).requires_grad_() for x in exact)
        y = attend(context.local(q), k, v, layout, scale=0.3)
        results.append(with_gradients(y, [q, k, v]))
        assert {x.dtype for x in results[-1]} == {dtype}
    for wide, narrow in zip(*results, strict=True):
        assert error(narrow.double(), wide) < 8e-3


@pytest.mark.usefixtures("on_gpu")
def test_of_registered_tensors_nothing_is_saved() -> None:
    """Keys and values are made again, as gathered tensors are given again; their values are no
    wider than before."""
    context, saved = Context(1, 2), []
    layout, (q, k, v) = SequenceLayout(B, T, CPU, context=context), operands(2, 6, 4)

    def make(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return 3 * k, 5 * v

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    recomputation = Recomputation()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), recomputation.watch():
        queries, made = context.local(q), make(k, v)
        recipe = Recipe(recomputation, (1, 2), make, (k, v))
        del saved[:]
        y = attend(queries, *made, layout, scale=0.3, recipe=recipe)
    sources = {x.data_ptr() for x in (k, v)}
    kept = [tuple(x.shape) for x in saved if x.data_ptr() not in sources]
    assert sorted(kept) == [(B, H, T // 2, 4), (B, H, T // 2, 6), (2 * B, H, T // 4)]
    expected = with_gradients(context.local(causal(q, *make(k, v))), [q, k, v])
    for ours, plain in zip(with_gradients(y, [q, k, v]), expected, strict=True):
        assert (ours - plain).abs().max() < 1e-12


# --- The calls ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("rank", range(4))
def test_one_call_for_both_squares_and_one_for_each_rectangle(
    rank: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are 4 ranks, and slices of 3 tokens. Backward's ranges of keys have limited bytes. A
    sequence by itself is not copied."""
    calls: list[tuple[int, ...]] = []

    def recorded(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> tuple[Any, ...]:
        calls.append((len(query), query.shape[2], key.shape[2], rest[4]))
        if rest[4] and rows == 1:
            assert key.untyped_storage() is k.untyped_storage()
        return reference(query, key, *rest, **options)

    def recorded_backward(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        _, query, key, *_, is_causal = arguments
        calls.append((len(query), query.shape[2], key.shape[2], is_causal))
        return reference_backward(*arguments, **options)

    monkeypatch.setattr(piece_kernels, "cudnn_attention", recorded)
    monkeypatch.setattr(piece_kernels, "cudnn_attention_backward", recorded_backward)
    monkeypatch.setattr(sliced_attention, "MOST_BYTES", 10 * rows * 2 * 2 * 6 * 8)
    q, k, v = (x[:rows].detach().requires_grad_() for x in operands(2, 6, 6))
    context = Context(rank, 4)
    y = attend(context.local(q), k, v, SequenceLayout(rows, T, CPU, context=context), scale=0.3)
    squares = (2 * rows, 3, 3, True)
    early, late = ((rows, 3, start, False) for start in (3 * rank, 3 * (7 - rank)))
    assert calls == [squares, *[early] * (rank > 0), late]
    del calls[:]
    y.sum().backward()
    lengths = [call[2] for call in calls[1:]]
    assert calls[0] == squares
    assert (
        lengths
        == {
            0: [7, 7, 7],
            1: [6, 3, 6, 6],
            2: [5, 5, 5, 1, 5],
            3: [4, 4, 4, 4, 4, 1],
        }[rank]
    )


# --- The choice -----------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the questions and trials of slices of four tokens, on a GPU that has all kernels."""
    asked: list[str] = []

    def chosen(case: Case, form: Any) -> SDPBackend:
        asked.append(f"chosen {[shape[1] for shape in case.shapes]} {form.padded}")
        return SDPBackend.CUDNN_ATTENTION

    def passes(case: Case, attend: Callable[[Operands], Tensor]) -> bool:
        asked.append(f"passes {[shape[1] for shape in case.shapes]}")
        return True

    monkeypatch.setattr(sliced_attention, "SHORTEST", 4)
    monkeypatch.setattr(sliced_attention, "is_gpu", lambda x: True)
    monkeypatch.setattr(Case, "chosen", chosen)
    monkeypatch.setattr(Case, "passes", passes)
    sliced_attention._passes.cache_clear()
    yield asked
    sliced_attention._passes.cache_clear()


def slices_of(length: int, gradients: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.zeros(2, length, 4, 6, dtype=torch.bfloat16, requires_grad=gradients).transpose(1, 2)
        for length in (2 * length, 8 * length, 8 * length)
    )
    return q, k, v


def test_the_choice_asks_for_a_slice_and_tries_all_pieces_once(asked: list[str]) -> None:
    for _ in range(2):
        assert cudnn_takes_slices(slices_of(4), [4, 24])
    assert asked == ["chosen [4, 4, 4] False", "passes [8, 32, 32]"]
    assert cudnn_takes_slices(slices_of(4), [8, 20])  # the trial is of another rank
    assert len(asked) == 4


def test_short_slices_and_the_switch_leave_them_to_flex_attention(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not cudnn_takes_slices(slices_of(3), [3, 18])
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert not cudnn_takes_slices(slices_of(4), [4, 24])
    assert asked == []


def test_another_kernel_and_a_failed_trial_leave_them_to_flex_attention(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Case, "passes", lambda case, attend: False)
    assert not cudnn_takes_slices(slices_of(4), [4, 24])
    sliced_attention._passes.cache_clear()
    monkeypatch.setattr(Case, "chosen", lambda case, form: SDPBackend.FLASH_ATTENTION)
    monkeypatch.setattr(Case, "passes", pytest.fail)
    assert not cudnn_takes_slices(slices_of(4), [4, 24])


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("gradients", [False, True])
def test_a_trial_runs_all_pieces(
    gradients: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a kernel for one of them it fails, and says so."""
    monkeypatch.undo()
    monkeypatch.setattr(sliced_attention, "SHORTEST", 4)
    monkeypatch.setattr(sliced_attention, "is_gpu", lambda x: True)
    monkeypatch.setattr(Case, "chosen", lambda case, form: SDPBackend.CUDNN_ATTENTION)
    calls: list[tuple[int, int, bool]] = []

    def recorded(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> tuple[Any, ...]:
        calls.append((query.shape[2], key.shape[2], rest[4]))
        if key.shape[2] == 20:
            raise RuntimeError("cuDNN Frontend error: No valid execution plans")
        return reference(query, key, *rest, **options)

    monkeypatch.setattr(piece_kernels, "cudnn_attention", recorded)
    monkeypatch.setattr(piece_kernels, "cudnn_attention_backward", reference_backward)
    assert cudnn_takes_slices(slices_of(4, gradients), [4, 24])
    assert calls == [(4, 4, True), (4, 4, False), (4, 24, False)]
    with pytest.warns(UserWarning, match="4x32x6 in bfloat16 failed.*No valid execution"):
        assert not cudnn_takes_slices(slices_of(4, gradients), [8, 20])


# --- The stand-in ---------------------------------------------------------------------------------

ON_THE_STANDIN = """
import torch
from lather.device import deterministic
from lather.models.attention_kernels import attend
from lather.models.context import Context
from lather.models.token_positions import SequenceLayout
from lather.standin.mode import StandInMode

class Counted(StandInMode):
    ran_here = ()
    def ran(self, operation):
        name = operation.name
        if "attention" in name:
            self.ran_here += (name.replace("_scaled_dot_product_", ""),)
    def launch(self, name, read, written, *, flops=0):
        self.ran_here += (name,)
    def launch_triton(self, function, arguments):
        pass

def show(what, dtype=torch.bfloat16, heads=(4, 2), widths=(128, 128), length=8192, rank=1,
         bounds=None, sinks=False, **options):
    context = Context(rank, 2)
    layout = SequenceLayout(2, length, mode.device, bounds, context=context)
    shapes = [(length // 2, heads[0], widths[0]), (length, heads[1], widths[0]),
              (length, heads[1], widths[1])]
    q, k, v = (torch.empty(2, *shape, dtype=dtype, device=mode.device).requires_grad_()
               for shape in shapes)
    sinks_H = torch.empty(heads[0], device=mode.device) if sinks else None
    mode.ran_here = ()
    y = attend(q, k, v, layout, sinks_H=sinks_H, **options)
    y.sum().backward()
    assert y.shape == (2, length // 2, heads[0], widths[1]) and y.dtype == dtype
    assert all(x.grad.shape == x.shape and x.grad.dtype == dtype for x in (q, k, v))
    names = [name for name in mode.ran_here if "delta" not in name]
    print(f"{what}:", *(f"{names.count(name)} {name}" for name in dict.fromkeys(names)))

with Counted() as mode:
    show("grouped")
    show("latent", heads=(4, 4), widths=(192, 128))
    show("rank 0", rank=0)
    show("a wide window", window=8192)
    show("fp32", dtype=torch.float32)
    show("documents", bounds=torch.tensor([0, 5000, 16384]))
    show("a window", window=4096)
    show("sinks", sinks=True)
    show("short", length=2048)
    show("uneven", widths=(132, 132))
    torch.backends.cuda.enable_cudnn_sdp(False)
    show("switched off")
    torch.backends.cuda.enable_cudnn_sdp(True)
    with deterministic():
        show("deterministic")
"""
FLEX = "1 flex attention 1 flex attention's backward"
EXPECTED = f"""
grouped: 3 cudnn_attention 3 cudnn_attention_backward
latent: 3 cudnn_attention 3 cudnn_attention_backward
rank 0: 2 cudnn_attention 2 cudnn_attention_backward
a wide window: 3 cudnn_attention 3 cudnn_attention_backward
fp32: {FLEX}
documents: {FLEX}
a window: {FLEX}
sinks: {FLEX}
short: {FLEX}
uneven: {FLEX}
switched off: {FLEX}
deterministic: {FLEX}
"""


def test_on_the_stand_in_plain_slices_take_cudnn_and_others_flex_attention() -> None:
    printed = printed_by(ON_THE_STANDIN, variables={"TRITON_INTERPRET": ""})
    assert printed.strip() == EXPECTED.strip()
