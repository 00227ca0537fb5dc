"""Blocks of a context rank on a CUDA device against fp64 on the CPU: flex attention gets fewer
queries than keys, and the gathered tensors are freed and given again. The ranks of a group are not
there: two ranks in one process have the same tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from bench.rehearsed_steps import COMMON
from lather.models.decoder import Block
from lather.models.families import FAMILIES, build_model
from lather.models.moe import MoE
from lather.models.token_positions import SequenceLayout
from lather.pipeline.chunk import ChunkTape, MicroBatch
from lather.pipeline.model_part import Stage
from lather.pipeline.segments import Segments
from lather.pipeline.tape import Frees
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
    family: str, packed: bool, recompute: tuple[str, ...]
) -> None:
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
