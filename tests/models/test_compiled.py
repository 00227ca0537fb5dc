"""Compiled parts give the model's numbers, each as one graph. They run in a process of their own:
annotations checked at run time break graphs."""

from __future__ import annotations

import pytest

from models.tiny import FAMILY_TABLES
from scripts import printed_by

COMPARE = """
import copy, sys, torch
from lather.models.families import build_model
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from torch._dynamo.utils import counters
from models.tiny import random_tokens, tiny_family_config

torch.set_num_threads(1)
for model_type in sys.argv[1:]:
    shapes = ((2, 7), (3, 5)) if model_type == "qwen3_moe" else ((2, 7),)
    torch._dynamo.reset()
    config = tiny_family_config(model_type, num_hidden_layers=LAYERS)
    plain = build_model(config, torch.Generator().manual_seed(0))
    compiled = copy.deepcopy(plain)
    num_parts = compiled.compile_parts(backend="aot_eager")
    assert list(compiled.state_dict()) == list(plain.state_dict())
    queue = WeightGradients()
    queue.deferring = True
    defer_weight_gradients(compiled, queue)
    errors = []
    for batch, length in shapes:
        tokens = random_tokens(batch, length)
        losses = []
        for model in (plain, compiled):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=length == 5):
                output = model(tokens, tokens.roll(1, 1))
                losses.append(sum(output.mtp_losses, output.loss))
            with torch.compiler.set_stance("fail_on_recompile"):
                losses[-1].backward()
        errors.append(abs(losses[0].item() / losses[1].item() - 1))
    WeightGradients.run(queue.take())
    pairs = zip(plain.parameters(), compiled.parameters())
    errors += [(torch.dist(p.grad, q.grad) / p.grad.norm()).item() for p, q in pairs]
    num_breaks = sum(counters["graph_break"].values())
    print(num_parts, num_breaks, counters["stats"]["unique_graphs"], max(errors))
    counters.clear()
"""


ATTENTION = """
import copy, sys, torch
from lather.models.token_positions import SequenceLayout
from models.test_grouped_query import OPTIONS, attention_with
from models.tiny import error, random_normal

torch.set_num_threads(1)
x_BSD = random_normal(2, 7, 12).requires_grad_()
for name in ("rotary of a part", "norm over heads", "gate, norm, window"):
    plain = attention_with(OPTIONS[name])
    compiled, results = copy.deepcopy(plain), []
    compiled.heads = torch.compile(compiled.heads, fullgraph=True, backend="aot_eager")
    for attention in (compiled, plain):
        y_BSD = attention(x_BSD, SequenceLayout(2, 7, torch.device("cpu")))
        leaves = [x_BSD, *attention.parameters()]
        results.append((y_BSD, *torch.autograd.grad(y_BSD.square().sum(), leaves)))
    print(max(error(*pair) for pair in zip(*results)))
"""

DELTA_NET = """
import copy, torch
from lather.models.saving.recomputed import Recomputation
from lather.models.token_positions import SequenceLayout
from lather.models.delta_net import DeltaSizes, GatedDeltaNet
from models.tiny import error, random_normal

torch.set_num_threads(1)
x_BSD = random_normal(2, 7, 12).requires_grad_()
layout = SequenceLayout(2, 7, torch.device("cpu"), torch.tensor([0, 3, 7, 14]))
for grouped in (True, False):
    plain = GatedDeltaNet(DeltaSizes(12, 2, 6, 5, 3, 4), 1e-6, grouped_projections=grouped).double()
    for number, p in enumerate(plain.parameters()):
        p.data.copy_(random_normal(*p.shape, seed=number))
    compiled, results = copy.deepcopy(plain), []
    for name in plain.parts_to_compile:
        part = torch.compile(getattr(compiled, name), fullgraph=True, backend="aot_eager")
        setattr(compiled, name, part)
    for layer in (compiled, plain):
        recomputation = Recomputation(warmed_up=set())
        with recomputation.watch():
            y_BSD = layer(x_BSD, layout, recomputation)
        with torch.compiler.set_stance("fail_on_recompile"):
            leaves = [x_BSD, *layer.parameters()]
            results.append((y_BSD, *torch.autograd.grad(y_BSD.square().sum(), leaves)))
    print(max(error(*pair) for pair in zip(*results)))
"""

CONTEXT = """
import copy, sys, torch
from lather.models.families import build_model
from lather.models.token_positions import SequenceLayout
from lather.pipeline.model_part import Stage
from lather.pipeline.segments import Segments
from models.tiny import error, tiny_family_config
from models.context_twins import Twins, input_of, stops, tape_of

torch.set_num_threads(1)
for model_type in sys.argv[1:]:
    config = tiny_family_config(model_type, num_hidden_layers=1)
    plain = build_model(config, torch.Generator().manual_seed(0)).double()
    compiled, results = copy.deepcopy(plain), []
    compiled.compile_parts(backend="aot_eager")
    for model in (plain, compiled):
        (block,) = model.layers
        layout = SequenceLayout(2, 16, torch.device("cpu"), context=Twins(0, 2))
        tape, x_BSD = tape_of(layout), input_of(block).double()
        _, y_BSD = stops(Segments().forward(Stage(0, (block,)), x_BSD, tape, []))
        with torch.compiler.set_stance("fail_on_recompile"):
            stops(Segments().backward(tape, torch.ones_like(y_BSD)))
        results.append((y_BSD, *(p.grad for p in block.parameters())))
    print(max(error(*pair) for pair in zip(*results)))
"""


def words_of(script: str, *arguments: str) -> list[list[str]]:
    printed = printed_by(script, *arguments, timeout=300)
    return [line.split() for line in printed.splitlines()]


def compared(*families: str, layers: int = 1, depths: int = 0) -> list[list[str]]:
    """Return for each family the numbers of parts, breaks and graphs, and the largest error."""
    sizes = f"{layers}, num_nextn_predict_layers={depths}" if depths else str(layers)
    return words_of(COMPARE.replace("LAYERS", sizes), *families)


def test_the_compiled_parts_are_the_model() -> None:
    lines = compared("qwen3_moe", "deepseek_v2")
    # attention and three norms: a graph of each kind, one more for recomputation in backward, and
    # more for other sizes
    assert [line[:3] for line in lines] == [["4", "0", "8"], ["4", "0", "4"]]
    assert max(float(line[3]) for line in lines) < 1e-6


@pytest.mark.grid
def test_the_compiled_parts_of_multi_token_prediction_are_the_model() -> None:
    ((num_parts, num_breaks, _, worst),) = compared("deepseek_v3", depths=1)
    assert (num_parts, num_breaks) == ("10", "0")  # two of attention, eight norms
    assert float(worst) < 1e-6


def test_compiled_options_of_attention_are_the_options() -> None:
    errors = [float(words[0]) for words in words_of(ATTENTION)]
    assert len(errors) == 3
    assert max(errors) < 1e-12


@pytest.mark.grid
def test_compiled_parts_of_gated_deltanet_have_the_same_numbers() -> None:
    assert all(float(worst) < 1e-12 for (worst,) in words_of(DELTA_NET))


@pytest.mark.grid
@pytest.mark.timeout(700)
@pytest.mark.parametrize("family", FAMILY_TABLES)
def test_the_compiled_parts_of_every_family_are_its_model(family: str) -> None:
    ((_, num_breaks, _, worst),) = compared(family, layers=3)
    assert num_breaks == "0"
    assert float(worst) < 1e-6


@pytest.mark.grid
def test_compiled_parts_of_context_ranks_have_the_same_gradients() -> None:
    errors = [float(words[0]) for words in words_of(CONTEXT, "deepseek_v2", "qwen3_moe")]
    assert len(errors) == 2
    assert max(errors) < 1e-12
