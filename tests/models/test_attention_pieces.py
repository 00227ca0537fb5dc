"""Attention on a CPU in pieces against a dense softmax, in fp64: documents, windows, sinks, groups,
widths and context ranks; what autograd saves; the largest tensor that is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lather.models import attention_pieces, token_positions
from lather.models.attention_kernels import Recipe, _with_sink_key, attend
from lather.models.context import Context
from lather.models.fused_attention import fused_attention
from lather.models.key_value_cache import KeyValueCache
from lather.models.saving.recomputed import Recomputation
from lather.models.token_positions import SequenceLayout
from lather.torch_private import TorchDispatchMode, cpu_attention, cpu_attention_backward
from models.tiny import error, random_normal

CPU = torch.device("cpu")
B, T, H = 2, 24, 4
DOCUMENTS = {
    "rows": None,
    "packed": [0, 1, 2, 9, 9, 20, 29, 30, 43, 48],
    "one row whole": [0, 24, 27, 48],
}
"""Boundaries of documents over two rows of 24 tokens. The second has documents of 1, 1, 7, no, 11
and 4 tokens, and in the next row of 5, 1, 13 and 5."""
WINDOWS = [None, 1, 2, 5, 6, 12, 30]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make bands of 4 queries, and no masks of short rows."""
    monkeypatch.setattr(attention_pieces, "BLOCK", 4)
    monkeypatch.setattr(token_positions, "SHORT", 0)


def layout_of(kind: str, context: Context | None = None) -> SequenceLayout:
    bounds = DOCUMENTS[kind]
    return SequenceLayout(
        B, T, CPU, None if bounds is None else torch.tensor(bounds), context=context
    )


def visible(kind: str, window: int | None) -> Tensor:
    """Return which queries attend to which keys, (B, 1, T, T)."""
    token_BT = torch.arange(B * T).view(B, T)
    bounds = torch.tensor(DOCUMENTS[kind] or [0]).unique()
    document_BT = torch.bucketize(token_BT, bounds, right=True)
    distance_TT = torch.arange(T)[:, None] - torch.arange(T)
    near_TT = (distance_TT >= 0) & (distance_TT < (window or T))
    return (near_TT & (document_BT[:, :, None] == document_BT[:, None])).unsqueeze(1)


def dense(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks_H: Tensor | None, scale: float
) -> Tensor:
    """Apply a softmax over all keys and the sink."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bshn,bthn->bhst", q, k) * scale
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks_H is not None:
        sink = sinks_H[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sink), -1)
    return torch.einsum("bhst,bthu->bshu", logits.softmax(-1)[..., : k.shape[1]], v)


def operands(groups: int = H, width: int = 6, value_width: int = 6) -> list[Tensor]:
    """Draw queries, keys, values and sinks."""
    shapes: list[tuple[int, ...]] = [(B, T, H, width), (B, T, groups, width)]
    shapes += [(B, T, groups, value_width), (H,)]
    return [random_normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def with_gradients(y: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    weights = random_normal(*y.shape, seed=9)
    gradients = torch.autograd.grad(y, leaves, weights, materialize_grads=True)
    return [y.detach(), *gradients]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, plain in zip(actual, expected, strict=True):
        assert (ours - plain).abs().max() < 1e-12


@pytest.mark.parametrize("kind", DOCUMENTS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize(
    "sizes", [(H, 6, 6), (2, 6, 6), (H, 6, 3), (1, 3, 5)], ids=["plain", "GQA", "MLA", "MQA"]
)
def test_pieces_are_a_dense_softmax_with_its_gradients(
    kind: str, window: int | None, has_sinks: bool, sizes: tuple[int, int, int]
) -> None:
    q, k, v, sinks = operands(*sizes)
    sink, leaves = (sinks, [q, k, v, sinks]) if has_sinks else (None, [q, k, v])
    actual = attend(q, k, v, layout_of(kind), window=window, sinks_H=sink, scale=0.3)
    expected = dense(q, k, v, visible(kind, window), sink, 0.3)
    assert_equal(with_gradients(actual, leaves), with_gradients(expected, leaves))


@pytest.mark.parametrize("kind", DOCUMENTS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
def test_slices_of_context_ranks_are_those_of_whole_sequences(
    kind: str, window: int | None, size: int, has_sinks: bool
) -> None:
    """Also where a window reaches over slices. The gradients are each rank's own."""
    q, k, v, sinks = operands(2)
    sink, leaves = (sinks, [q, k, v, sinks]) if has_sinks else (None, [q, k, v])
    for rank in range(size):
        context = Context(rank, size)
        expected = context.local(dense(q, k, v, visible(kind, window), sink, 0.3))
        actual = attend(
            context.local(q),
            k,
            v,
            layout_of(kind, context),
            window=window,
            sinks_H=sink,
            scale=0.3,
        )
        assert_equal(with_gradients(actual, leaves), with_gradients(expected, leaves))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_narrower_dtypes_round(dtype: torch.dtype, tolerance: float) -> None:
    """Merging and adding up round no more than the kernel."""
    layout, exact = layout_of("packed", Context(1, 2)), operands(2)
    results = []
    for tensors in (exact, [x.detach().to(dtype).requires_grad_() for x in exact]):
        q, k, v, sinks = tensors
        y = attend(q[:, : T // 2], k, v, layout, window=5, sinks_H=sinks)
        assert y.dtype == tensors[0].dtype
        weights = random_normal(*y.shape, seed=9).to(y.dtype)
        results.append([y, *torch.autograd.grad(y, tensors, weights)])
    for wide, narrow in zip(*results, strict=True):
        assert error(narrow.double(), wide) < tolerance


def test_memory_order_does_not_matter() -> None:
    """The kernel relies on neighboring elements without a check."""
    q, k, v, sinks = operands()
    layout, plain = layout_of("packed"), dense(q, k, v, visible("packed", 5), sinks, 0.3)
    turned = (x.mT.contiguous().mT for x in (q, k, v))
    y = attend(*turned, layout, window=5, sinks_H=sinks, scale=0.3)
    assert error(y, plain) < 1e-12
    for ours, expected in zip(
        *(torch.autograd.grad(x.mT.sum(), (q, k, v, sinks)) for x in (y, plain)), strict=True
    ):
        assert error(ours, expected) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, [3, 0]], ids=["full", "padded"])
def test_a_cache_with_sinks_gives_the_same(padding: list[int] | None) -> None:
    q, k, v, sinks = operands(2)
    cache = KeyValueCache(None if padding is None else torch.tensor(padding))
    mask, start, parts = visible("rows", 5).clone().expand(B, -1, -1, -1).clone(), 0, []
    for row, number in enumerate(padding or []):
        mask[row, :, number:, :number] = False
    for length in (9, 1, 14):
        now = slice(start, start + length)
        layout = SequenceLayout(B, length, CPU, None, cache)
        seen = slice(0, start + length)
        parts.append(attend(q[:, now], k[:, seen], v[:, seen], layout, window=5, sinks_H=sinks))
        start += length
    expected, together = dense(q, k, v, mask, sinks, 6**-0.5), torch.cat(parts, 1)
    for row, number in enumerate(padding or [0, 0]):
        assert error(together[row, number:], expected[row, number:]) < 1e-12


@pytest.mark.parametrize("window", [None, 5])
def test_a_sink_as_a_key_gives_the_same(window: int | None) -> None:
    """This is the form for kernels that return no log-sum-exps, on CUDA with a cache."""
    q, k, v, sinks = operands(2, 6, 4)
    mask = layout_of("packed").mask(window)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    actual = fused_attention(*_with_sink_key(*heads, sinks, mask, 0.3)).transpose(1, 2)
    expected = dense(q, k, v, visible("packed", window), sinks, 0.3)
    leaves = [q, k, v, sinks]
    assert_equal(with_gradients(actual, leaves), with_gradients(expected, leaves))


def test_gradients_have_the_same_bits_each_time() -> None:
    q, k, v, sinks = (x.detach().float().requires_grad_() for x in operands(2))
    bits = []
    for _ in range(3):
        y = attend(q, k, v, layout_of("packed"), window=5, sinks_H=sinks)
        gradients = torch.autograd.grad(y.square().sum(), (q, k, v, sinks))
        bits.append(b"".join(x.numpy().tobytes() for x in gradients))
    assert len(set(bits)) == 1


# --- What is saved --------------------------------------------------------------------------------


def test_of_registered_tensors_nothing_is_saved() -> None:
    """Only the output and its log-sum-exps are, with sinks too; values of latent attention are
    padded, and made again in that form."""
    layout, saved = layout_of("packed"), []
    q, k, v, sinks = operands(2, 6, 4)

    def make(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return 2 * q, 3 * k, 5 * v

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    recomputation = Recomputation()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), recomputation.watch():
        heads = make(q, k, v)
        recipe = Recipe(recomputation, (0, 1, 2), make, (q, k, v))
        del saved[:]
        y = attend(*heads, layout, window=5, sinks_H=sinks, recipe=recipe)
    sources = {x.data_ptr() for x in (q, k, v, sinks)}
    made = [tuple(x.shape) for x in saved if x.data_ptr() not in sources]
    assert sorted(made) == [(B, H, T), (B, H, T, 6)]
    expected = dense(*make(q, k, v), visible("packed", 5), sinks, 6**-0.5)
    leaves = [q, k, v, sinks]
    assert_equal(with_gradients(y, leaves), with_gradients(expected, leaves))


class Largest(TorchDispatchMode):
    """Records the most elements of a tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def long_documents(length: int) -> Tensor:
    """Return the boundaries of documents of 100 to 500 tokens."""
    sizes = torch.randint(100, 501, (length // 100,), generator=torch.Generator().manual_seed(0))
    ends = sizes.cumsum(0)
    return torch.cat((torch.tensor([0]), ends[ends < length], torch.tensor([length])))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("context", [None, Context(1, 2)], ids=["whole", "context"])
def test_no_tensor_has_the_pairs_of_4096_tokens(
    packed: bool, window: int | None, context: Context | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest are queries and the like, in forward and backward."""
    monkeypatch.undo()
    length = 4096
    local = length if context is None else length // context.size
    q, k, v = (torch.randn(1, size, 2, 16, requires_grad=True) for size in (local, length, length))
    sinks = torch.randn(2, requires_grad=True)
    with Largest() as largest:
        bounds = long_documents(length) if packed else None
        layout = SequenceLayout(1, length, CPU, bounds, context=context)
        attend(q, k, v, layout, window=window, sinks_H=sinks).sum().backward()
    assert k.numel() <= largest.numel <= 2 * k.numel()


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("context", [None, Context(3, 4)], ids=["whole", "context"])
def test_layouts_of_131072_tokens_have_no_pairs(
    window: int | None, context: Context | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block mask has an element for 128 x 128 pairs, and pieces as many as documents."""
    monkeypatch.undo()
    length = 2**17
    with Largest() as largest:
        bounds = torch.cat((long_documents(2**16), torch.tensor([length])))
        layout = SequenceLayout(1, length, CPU, bounds, context=context)
        pieces = layout.pieces(window, torch.float32)
        in_pieces, largest.numel = largest.numel, 0
        layout.block_mask(window)
    assert in_pieces <= max(4 * length, 64 * (64 + 4096))
    assert largest.numel <= 2 * (length // 128) ** 2
    num_queries = sum(block.tokens.stop - block.tokens.start for block in pieces.blocks)
    assert num_queries == layout.length


def test_the_private_kernel_gives_log_sum_exps_and_takes_fewer_heads_of_keys() -> None:
    """In backward it takes the output and log-sum-exps of more keys than it is given."""
    q, k, v = (random_normal(2, heads, 9, 5, seed=heads).requires_grad_() for heads in (4, 2, 2))
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    logits = 0.3 * q @ wide_k.mT
    y = logits.softmax(-1) @ wide_v
    expected = torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
    lse = logits.logsumexp(-1).detach()
    q, k, v, y = (x.detach() for x in (q, k, v, y))
    output, sums = cpu_attention(q, k, v, scale=0.3)
    assert error(output, y) < 1e-12
    assert error(sums, lse) < 1e-12
    options = {"dropout_p": 0.0, "is_causal": False, "scale": 0.3}
    parts = [
        cpu_attention_backward(
            torch.ones_like(y), q, k[:, :, keys], v[:, :, keys], y, lse, **options
        )
        for keys in (slice(0, 4), slice(4, 9))
    ]
    (dq, dk, dv), (dq_2, dk_2, dv_2) = parts
    actual = (dq + dq_2, torch.cat((dk, dk_2), 2), torch.cat((dv, dv_2), 2))
    for ours, plain in zip(actual, expected, strict=True):
        assert error(ours, plain) < 1e-12
    assert math.isfinite(float(sums.sum()))
