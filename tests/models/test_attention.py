"""Attention against a plain softmax, a head and a position at a time, in fp64; packed documents;
tensors that are made once in a forward pass; how often flex attention is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from lather.errors import UserError
from lather.models import flex_attention as flex
from lather.models import token_positions
from lather.models.attention import GroupedQueryAttention, HeadSizes, QueryKeyNorm
from lather.models.attention_kernels import attend
from lather.models.attention_pieces import Pieces
from lather.models.document_boundaries import check_boundaries
from lather.models.flex_attention import (
    FLEX_DTYPES,
    compiled_often,
    flex_options,
    flexible_attention,
)
from lather.models.rotary import Rotary
from lather.models.token_positions import SequenceLayout
from models.tiny import error, random_normal, random_tokens, tiny_family_model

CPU = torch.device("cpu")
B, S, H, N = 2, 7, 6, 5
PACKED = [0, 3, 4, 4, 9, 14]
"""Ends of documents over two rows of 7 tokens: documents of 3, 1, no, 3 and then, in the next row,
2 and 5 tokens."""
DOCUMENTS = [[0, 0, 0, 1, 2, 2, 2], [3, 3, 4, 4, 4, 4, 4]]


def layout(packed: bool = False, length: int = S) -> SequenceLayout:
    return SequenceLayout(B, length, CPU, torch.tensor(PACKED) if packed else None)


def inputs(num_kv_heads: int = H, value_width: int = N, length: int = S) -> list[Tensor]:
    """Draw queries, keys, values and sinks."""
    shapes = [
        (B, length, H, N),
        (B, length, num_kv_heads, N),
        (B, length, num_kv_heads, value_width),
    ]
    shapes.append((H,))  # type: ignore[arg-type]
    return [random_normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def sees(b: int, query: int, key: int, window: int | None, packed: bool) -> bool:
    same = not packed or DOCUMENTS[b][query] == DOCUMENTS[b][key]
    return key <= query and same and (window is None or query - key < window)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    window: int | None = None,
    packed: bool = False,
    scale: float = N**-0.5,
) -> Tensor:
    """Apply a softmax over the visible keys and the sink, a head and a position at a time."""
    rows = []
    for b, s, h in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        group = h // (q.shape[2] // k.shape[2])
        keys = [key for key in range(q.shape[1]) if sees(b, s, key, window, packed)]
        scores = scale * (k[b, keys, group] @ q[b, s, h])
        if sinks is not None:
            scores = torch.cat((scores, sinks[h : h + 1]))
        rows.append(scores.softmax(0)[: len(keys)] @ v[b, keys, group])
    return torch.stack(rows).view(*q.shape[:3], v.shape[-1])


def assert_same_with_gradients(
    actual: Tensor, expected: Tensor, leaves: list[Tensor], tolerance: float = 1e-12
) -> None:
    assert error(actual, expected) < tolerance
    cotangent = random_normal(*expected.shape, seed=9)
    for ours, plain in zip(
        torch.autograd.grad(actual, leaves, cotangent),
        torch.autograd.grad(expected, leaves, cotangent),
        strict=True,
    ):
        assert plain.abs().max() > 1e-3
        assert error(ours, plain) < tolerance


@pytest.mark.parametrize("num_kv_heads", [H, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("window", [None, 1, 3, S - 1, S])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
def test_attention_is_a_plain_softmax_with_its_gradients(
    num_kv_heads: int, packed: bool, window: int | None, has_sinks: bool
) -> None:
    q, k, v, sinks = inputs(num_kv_heads)
    sink = sinks if has_sinks else None
    actual = attend(q, k, v, layout(packed), window=window, sinks_H=sink)
    leaves = [v, sinks] if has_sinks else [v]
    if window != 1:  # with one key and no sink, scores do not matter
        leaves += [q, k]
    assert_same_with_gradients(
        actual, plain_attention(q, k, v, sink, window=window, packed=packed), leaves
    )


@pytest.mark.parametrize("value_width", [1, 4, 5, 6, 9])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_width_of_values_and_the_scale_are_free(
    value_width: int, has_sinks: bool, scale: float | None
) -> None:
    q, k, v, sinks = inputs(2, value_width)
    sink = sinks if has_sinks else None
    expected = plain_attention(q, k, v, sink, scale=N**-0.5 if scale is None else scale)
    assert_same_with_gradients(
        attend(q, k, v, layout(), scale=scale, sinks_H=sink), expected, [q, k, v]
    )


@pytest.mark.parametrize("length", [1, 2, 63])
def test_odd_lengths(length: int) -> None:
    q, k, v, sinks = inputs(2, length=length)
    expected = plain_attention(q, k, v, sinks, window=17)
    assert error(attend(q, k, v, layout(length=length), window=17, sinks_H=sinks), expected) < 1e-12


@pytest.mark.parametrize("which", range(4), ids=["queries", "keys", "values", "sinks"])
def test_tolerance_rejects_an_error_of_one_percent(which: int) -> None:
    tensors = inputs(2)
    expected = plain_attention(*tensors)
    tensors[which] = 1.01 * tensors[which]
    q, k, v, sinks = tensors
    assert error(attend(q, k, v, layout(), sinks_H=sinks), expected) > 1e-4


def test_a_sink_of_minus_infinity_is_none_and_a_great_one_takes_all() -> None:
    q, k, v, _ = inputs()
    without = attend(q, k, v, layout())
    absent, great = (torch.full((H,), x, dtype=torch.float64) for x in (-1e9, 1e3))
    assert error(attend(q, k, v, layout(), sinks_H=absent), without) < 1e-12
    assert attend(q, k, v, layout(), sinks_H=great).abs().max() < 1e-100
    assert torch.equal(without, attend(q, k, v, layout(), scale=1 / math.sqrt(N)))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
def test_flex_attention_gives_the_same(packed: bool, window: int | None, has_sinks: bool) -> None:
    """This is CUDA's path, here without its kernel. (tests/gpu has the kernel, and gradients.)"""
    q, k, v, sinks = inputs(2)
    sink = sinks if has_sinks else None
    heads = [x.transpose(1, 2).float() for x in (q, k, v)]
    actual = flexible_attention(
        *heads, layout(packed).block_mask(window), N**-0.5, None if sink is None else sink.float()
    )
    expected = plain_attention(q, k, v, sink, window=window, packed=packed)
    assert actual.dtype in FLEX_DTYPES
    assert error(actual.transpose(1, 2), expected.float()) < 1e-6


@pytest.mark.parametrize(
    ("width", "dtype", "fits"),
    [(192, torch.float32, True), (128, torch.float32, False), (192, torch.bfloat16, False)],
)
def test_flex_attention_takes_smaller_tiles_for_wide_heads_in_fp32(
    width: int, dtype: torch.dtype, fits: bool
) -> None:
    """The tiles of query, key and value fit the memory that a block has on every GPU."""
    options = flex_options(torch.empty(1, 1, 4, width, dtype=dtype))
    assert (options is not None) == fits
    if options is not None:
        rows = options["fwd_BLOCK_M"] + 2 * options["fwd_BLOCK_N"] * options["fwd_num_stages"]  # type: ignore[typeddict-item]
        assert rows * 256 * 4 <= 99 * 1024


def test_grouped_queries_keep_no_more_than_the_formula_says() -> None:
    """Norms of queries and keys, and biases, have parameters only where they are asked for."""
    sizes = HeadSizes(hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=6)
    plain = {f"{name}_proj.weight" for name in "qkvo"}
    for options, more in (
        ({}, set()),
        ({"qk_norm": QueryKeyNorm(1e-6)}, {"q_norm.weight", "k_norm.weight"}),
        ({"bias": True}, {f"{name}_proj.bias" for name in "qkv"}),
        ({"output_bias": True}, {"o_proj.bias"}),
        ({"sinks": True}, {"sinks"}),
    ):
        attention = GroupedQueryAttention(sizes, Rotary(6, 10.0), **options)
        assert attention.state_dict().keys() == plain | more


# --- Layouts --------------------------------------------------------------------------------------


def test_positions_restart_and_documents_end_with_rows() -> None:
    packed = layout(packed=True)
    assert packed.positions.tolist() == [[0, 1, 2, 0, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]]
    assert packed.documents is not None
    assert packed.documents.tolist() == DOCUMENTS
    assert layout().positions.tolist() == [list(range(S))]


@pytest.mark.parametrize("boundaries", [[0, 14], [0, 7, 14], [0, 0, 7, 7, 14, 14]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_whole_rows_are_no_packing(boundaries: list[int], dtype: torch.dtype) -> None:
    rows = SequenceLayout(B, S, CPU, torch.tensor(boundaries, dtype=dtype))
    assert rows.documents is None
    assert rows.is_plain(None)
    assert rows.positions.tolist() == [list(range(S))]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_an_empty_batch_has_a_layout(shape: tuple[int, int]) -> None:
    empty = SequenceLayout(*shape, CPU, torch.tensor([0, 0]))
    q = torch.zeros(*shape, 2, 4)
    assert attend(q, q, q, empty).shape == q.shape


@pytest.mark.parametrize(
    ("bad", "error_type", "words"),
    [
        ([0.0, 14.0], TypeError, "torch.float32"),
        ([[0, 14]], ValueError, "shape (1, 2)"),
        ([14], ValueError, "shape (1,)"),
        ([1, 14], ValueError, "from 1 to 14: it must go from 0 to batch * length = 14"),
        ([0, 13], ValueError, "from 0 to 13"),
        ([0, 15], ValueError, "from 0 to 15"),
        ([0, 9, 5, 14], ValueError, "falls from 9 to 5 at entry 2"),
    ],
    ids=str,
)
def test_bad_boundaries_are_refused(
    bad: list[Any], error_type: type[Exception], words: str
) -> None:
    with pytest.raises(error_type) as raised:
        check_boundaries(torch.tensor(bad), B * S)
    assert str(raised.value).startswith("cu_seqlens ")
    assert words in str(raised.value)


def test_a_mask_is_what_is_seen() -> None:
    mask = layout(packed=True).mask(3)
    expected = [
        [[sees(b, query, key, 3, packed=True) for key in range(S)] for query in range(S)]
        for b in range(B)
    ]
    assert mask.squeeze(1).tolist() == expected


def test_masks_and_tables_are_made_once_for_all_layers() -> None:
    shared, fp32 = layout(), torch.float32
    assert shared.mask(3) is shared.mask(3) is not shared.mask(4)
    assert shared.mask(S) is shared.mask(100) is shared.mask(None)
    assert shared.block_mask(3) is shared.block_mask(3)
    assert shared.pieces(3, fp32) is shared.pieces(3, fp32) is not shared.pieces(4, fp32)
    table = shared.rotary_tables(Rotary(4, 10.0), fp32)[0]
    assert shared.rotary_tables(Rotary(4, 10.0), torch.bfloat16)[0] is table
    assert shared.rotary_tables(Rotary(4, 11.0), fp32)[0] is not table
    assert shared.rotary_tables(Rotary(4, 10.0), torch.float64)[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("model_type", "packed", "num_windows"),
    [
        ("deepseek_v2", False, 0),
        ("deepseek_v2", True, 1),
        ("qwen3_moe", False, 0),
        ("gpt_oss", False, 2),
        ("gpt_oss", True, 2),
    ],
)
def test_a_forward_pass_makes_pieces_for_each_distinct_window(
    model_type: str, packed: bool, num_windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int | None] = []
    original: Callable[..., Any] = Pieces.of

    def of(segments: Any, window: int | None, *options: Any) -> Pieces:
        made.append(window)
        pieces: Pieces = original(segments, window, *options)
        return pieces

    monkeypatch.setattr(Pieces, "of", of)
    monkeypatch.setattr(token_positions, "SHORT", 0)
    model = tiny_family_model(model_type, num_hidden_layers=5)
    model(random_tokens(B, S), cu_seqlens=torch.tensor(PACKED) if packed else None)
    assert len(made) == num_windows


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["deepseek_v2", "qwen3_moe", "gpt_oss"])
def test_packed_documents_give_what_each_gives_alone(model_type: str) -> None:
    changes = {"sliding_window": 2} if model_type == "gpt_oss" else {}
    model, tokens = tiny_family_model(model_type, **changes), random_tokens(B, S)
    together = model(tokens, cu_seqlens=torch.tensor(PACKED)).logits_BSV
    for b, start, stop in [(0, 0, 3), (0, 3, 4), (0, 4, 7), (1, 0, 2), (1, 2, 7)]:
        alone = model(tokens[b : b + 1, start:stop]).logits_BSV[0]
        assert error(together[b, start:stop], alone) < 2e-6
    assert error(model(tokens).logits_BSV, together) > 1e-2


# --- Compiled flex attention ----------------------------------------------------------------------


def added(x: Tensor, kind: str) -> Tensor:
    return x + len(kind)


def test_a_function_is_compiled_for_more_kinds_than_torch_allows_and_then_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's limit, 8, stays as it is for others. What has been compiled still runs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flex, "MOST_VARIANTS", 10)
    compiled, x = compiled_often(added), torch.zeros(2)
    kinds = ["x" * length for length in range(10)]
    before = counters["stats"]["unique_graphs"]
    assert [int(compiled(x, kind)[0]) for kind in kinds] == list(range(10))
    assert counters["stats"]["unique_graphs"] == before + 10
    with pytest.raises(UserError, match=r"^added was compiled for 10 kinds of masks and shapes"):
        compiled(x, "x" * 10)
    assert int(compiled(x, kinds[3])[0]) == 3
    assert dynamo_config.recompile_limit == 8


def test_a_kind_of_mask_is_compiled_for_at_most_five_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths and batch sizes are dynamic from the second on; `MOST_VARIANTS` relies on it. The
    code is traced, not run, because flex attention has no backward on a CPU."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def not_run(*args: object) -> None:
            raise RuntimeError("traced, not run")

        return not_run

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    compiled, num_graphs = compiled_often(flex_attention), []
    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    for batch, length in [(2, 32), (4, 32), (1, 32), (2, 48), (3, 40), (1, 24), (8, 90), (5, 70)]:
        q = torch.zeros(batch, 2, length, 16, requires_grad=True)
        blocks = SequenceLayout(batch, length, CPU).block_mask(20)
        with pytest.raises(RuntimeError, match="traced, not run"):
            compiled(q, q, q, block_mask=blocks, return_aux=AuxRequest(lse=True))
        num_graphs.append(counters["stats"]["unique_graphs"] - before)
    torch.compiler.reset()
    assert num_graphs[0] == 1
    assert num_graphs[-1] == num_graphs[-3] <= 5
