"""Blocks and attention of a context rank on a CUDA device against fp64 on the CPU: flex attention,
and cuDNN's in pieces, get fewer queries than keys, and the gathered tensors are freed and given
again. The ranks of a group are not there: two ranks in one process have the same tokens."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.rehearsed_steps import COMMON
from lather.models import sliced_attention
from lather.models.attention_kernels import attend
from lather.models.block import Block
from lather.models.context import Context
from lather.models.families import FAMILIES, build_model
from lather.models.moe import MoE
from lather.models.token_positions import SequenceLayout
from lather.pipeline.chunk import ChunkTape, MicroBatch
from lather.pipeline.model_part import Stage
from lather.pipeline.segments import Segments
from lather.pipeline.tape import Frees
from lather.torch_private import TorchDispatchMode
from models.context_twins import Twins, stops
from models.tiny import FAMILY_TABLES, error, random_normal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTH = 192
"""Tokens of a rank, of each of two sequences."""


def results(block: Block, dtype: torch.dtype, packed: bool, segments: Segments) -> list[Tensor]:
    """Return the output and the gradients of all parameters, in fp64, with a fixed routing."""
    block = copy.deepcopy(block).to(dtype)
    device = block.input_layernorm.weight.device
    bounds = torch.tensor([0, 70, 100, 384, 600, 768]) if packed else None
    layout = SequenceLayout(2, 2 * LENGTH, device, bounds, context=Twins(0, 2))
    tokens_BS = torch.zeros(2, LENGTH, dtype=torch.long, device=device)
    tape = ChunkTape(MicroBatch(tokens_BS, tokens_BS, layout))
    x_BSD = random_normal(2, LENGTH, COMMON["hidden_size"]).to(device, dtype)
    assert isinstance(block.mlp, MoE)
    experts, chosen = len(block.mlp.gate.weight), block.mlp.gate.num_experts_per_tok
    first_T = torch.arange(2 * LENGTH, device=device) % experts
    forced_TK = (first_T[:, None] + torch.arange(chosen, device=device)) % experts
    with block.mlp.gate.replay(forced_TK):
        _, y_BSD = stops(segments.forward(Stage(0, (block,)), x_BSD, tape, []))
    stops(segments.backward(tape, random_normal(*y_BSD.shape, seed=1).to(y_BSD)))
    found = [y_BSD, *(p.grad for p in block.parameters() if p.grad is not None)]
    return [x.detach().double().cpu() for x in found]


@pytest.mark.parametrize("recompute", [(), ("attention",)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe", "gpt_oss", "mixtral"])
def test_a_context_rank_on_a_gpu_computes_what_a_cpu_does(
    family: str, packed: bool, recompute: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 cuDNN attends to plain slices, although they are short."""
    monkeypatch.setattr(sliced_attention, "SHORTEST", 1)
    sizes = {**COMMON, **FAMILY_TABLES[family].wide}
    model = build_model(FAMILIES[family].config(**sizes), torch.Generator().manual_seed(0))
    block = model.layers[-1]
    expected = results(block, torch.float64, packed, Segments())
    on_gpu = copy.deepcopy(block).cuda()
    poisoned = Segments(frees=Frees(poison=True), recompute=recompute)
    for x, y in zip(results(on_gpu, torch.float32, packed, poisoned), expected, strict=True):
        assert error(x, y) < 1e-3
    narrow = Segments(recompute=recompute, autocast=torch.bfloat16)
    for x, y in zip(results(on_gpu, torch.float32, packed, narrow), expected, strict=True):
        assert error(x, y) < 0.15


class Called(TorchDispatchMode):
    """Counts the calls of cuDNN's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _, _, name = func.name().partition("_scaled_dot_product_")
        self.calls.update([name] if name.startswith("cudnn") else [])
        return func(*args, **(kwargs or {}))


def attended(tensors: list[Tensor], rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of plain causal attention of one of two context ranks, in
    fp64, computed in another dtype; in fp64 that has a mask."""
    q, k, v = (x.cuda().to(dtype).requires_grad_() for x in tensors)
    context = Context(rank, 2)
    layout = SequenceLayout(len(k), k.shape[1], k.device, context=context)
    y = attend(context.local(q), k, v, layout)
    gradients = torch.autograd.grad(y, (q, k, v), random_normal(*y.shape, seed=9).to(y))
    return [x.detach().double() for x in (y, *gradients)]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="needs a GPU for which torch prefers cuDNN's attention",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "sizes", [(1, 8, 2, 128, 128), (2, 4, 4, 192, 128), (2, 4, 4, 64, 64)], ids=str
)
def test_cudnn_attends_to_plain_slices_of_1024_tokens(
    sizes: tuple[int, ...], rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward has the late rectangle in two ranges of keys."""
    batch, heads, groups, width, value_width = sizes
    bytes_of_key = batch * groups * (width + value_width) * dtype.itemsize
    monkeypatch.setattr(sliced_attention, "MOST_BYTES", 2048 * bytes_of_key)
    shapes = [(heads, width), (groups, width), (groups, value_width)]
    exact = [
        random_normal(batch, 4096, *shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)
    ]
    attended(exact, rank, dtype)  # with the trial
    with Called() as called:
        actual = attended(exact, rank, dtype)
    forward, backward = (2, 3) if rank == 0 else (3, 4)
    assert called.calls == {"cudnn_attention": forward, "cudnn_attention_backward": backward}
    for x, y in zip(actual, attended(exact, rank, torch.float64), strict=True):
        assert error(x, y) < 2e-2
