"""`per_head`: heads of matrices as matrices of their own, compared with an optimizer of pieces that
were cut by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from optim_helpers import CLASSES, give_gradients, parameter
from torch import Tensor, nn

from lather.optim import SOAP, MatrixOptimizer, Muon, SOAPMuon, parameter_groups, per_head


class Cut:
    """Matrices, and an optimizer of their heads, which are parameters of their own."""

    def __init__(self, cls: Any, cuts: Sequence[tuple[Tensor, int, int]], **options: Any) -> None:
        """`cuts`: a matrix, the dim along which it is cut, and the width of a head."""
        self.cuts = [(w.detach().clone(), dim, width) for w, dim, width in cuts]
        self.heads = [
            [nn.Parameter(x.clone()) for x in w.split(width, dim)] for w, dim, width in self.cuts
        ]
        self.optimizer = cls([p for heads in self.heads for p in heads], **options)

    def step(self, grads: Sequence[Tensor | None]) -> None:
        for heads, (_, dim, width), grad in zip(self.heads, self.cuts, grads, strict=True):
            assert grad is not None
            for p, g in zip(heads, grad.split(width, dim), strict=True):
                p.grad = g.clone()
        self.optimizer.step()

    def whole(self) -> list[Tensor]:
        return [
            torch.cat([p.detach() for p in heads], dim)
            for heads, (_, dim, _) in zip(self.heads, self.cuts, strict=True)
        ]


@pytest.mark.parametrize(
    "options", [{}, {"keep_norm": True, "weight_decay": 0.1}], ids=["", "norm"]
)
@pytest.mark.parametrize("name", CLASSES)
def test_a_step_is_that_of_heads_cut_by_hand(name: str, options: dict[str, Any]) -> None:
    cls, options = CLASSES[name], {"lr": 1e-2, **options}
    q, o, whole = parameter(12, 8), parameter(8, 12, seed=1), parameter(12, 8)
    layout = {"matrix_layout": "per_head"}
    groups = [
        {"params": [q], **layout, "head_rows": 4},
        {"params": [o], **layout, "head_columns": 3},
    ]
    together, alone = cls(groups, **options), cls([whole], **options)
    by_hand = Cut(cls, [(q, 0, 4), (o, 1, 3)], **options)
    for step in range(6):
        give_gradients([q, o], step)
        assert q.grad is not None
        whole.grad = q.grad.clone()
        by_hand.step([q.grad, o.grad])
        together.step()
        alone.step()
    assert all(map(torch.equal, (q, o), by_hand.whole()))
    is_elementwise = name == "AdamW" and not options.get("keep_norm")
    assert torch.equal(q, whole) is is_elementwise


@pytest.mark.parametrize("cls", [SOAP, Muon, SOAPMuon])
def test_a_fused_weight_is_its_parts(cls: Any) -> None:
    """Four heads of queries, two of keys and two of values, all of four rows."""
    sizes, layout = (16, 8, 8), {"matrix_layout": "per_head", "head_rows": 4, "lr": 1e-2}
    fused = parameter(32, 12)
    parts = [nn.Parameter(x.clone()) for x in fused.detach().split(sizes)]
    one, three = cls([fused], **layout), cls(parts, **layout)
    for step in range(5):
        give_gradients([fused], step)
        assert fused.grad is not None
        for p, g in zip(parts, fused.grad.split(sizes), strict=True):
            p.grad = g.clone()
        one.step()
        three.step()
    assert torch.equal(fused, torch.cat([p.detach() for p in parts]))


def test_the_update_of_a_head_has_the_size_of_that_of_a_whole_matrix() -> None:
    """The scale is that of the head's shape, so one learning rate is good for both."""
    q, whole = parameter(64, 96), parameter(64, 96)
    before = q.detach().clone()
    optimizers = (
        Muon([q], lr=1.0, weight_decay=0.0, matrix_layout="per_head", head_rows=16),
        Muon([whole], lr=1.0, weight_decay=0.0),
    )
    give_gradients([q], 0)
    whole.grad = q.grad
    for optimizer in optimizers:
        optimizer.step()
    sizes = [(p.detach() - before).square().mean().sqrt() for p in (q, whole)]
    of_heads = (q.detach() - before).unflatten(0, (4, 16)).square().mean((1, 2)).sqrt()
    assert 0.8 < float(sizes[0] / sizes[1]) < 1.25
    assert float(of_heads.max() / of_heads.min()) < 1.1


def assert_trains_like_cut(
    model: nn.Module,
    optimizer: MatrixOptimizer,
    weights: dict[str, tuple[int, int]],
) -> None:
    """Train a model for three steps, and compare the named weights, each cut along a dim into heads
    of a width, with Muon of the pieces."""
    named = dict(model.named_parameters())
    by_hand = Cut(Muon, [(named[name], *cut) for name, cut in weights.items()], lr=1e-2)
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        by_hand.step([named[name].grad for name in weights])
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, (named[name] for name in weights), by_hand.whole()))


def test_heads_of_a_llama_of_transformers() -> None:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    rows = dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.head_dim)
    groups = per_head(parameter_groups(model), rows=rows, columns={"o_proj": config.head_dim})
    sizes = [(group.get("head_rows"), group.get("head_columns")) for group in groups]
    assert sizes == [(None, None), (6, None), (None, 6), (None, None)]
    first = {name for name, _ in groups[0]["params"]}
    assert first == {name for name, _ in model.named_parameters() if "mlp" in name}
    path = "model.layers.1.self_attn"
    cuts = {f"{path}.{name}_proj.weight": (0, 6) for name in "qkv"}
    cuts[f"{path}.o_proj.weight"] = (1, 6)
    assert_trains_like_cut(model, Muon(groups, lr=1e-2), cuts)


def test_heads_of_the_fused_and_transposed_weight_of_gpt2() -> None:
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=1, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    groups = parameter_groups(model, adam_names=("wte", "wpe"))
    optimizer = Muon(per_head(groups, columns={"c_attn": 6}), lr=1e-2)
    assert_trains_like_cut(model, optimizer, {"transformer.h.0.attn.c_attn.weight": (1, 6)})


def test_adapters_and_biases_have_no_heads() -> None:
    names = {
        "q_proj.weight": (8, 8),
        "q_proj.lora_A.weight": (2, 8),
        "q_proj.lora_B.weight": (8, 2),
    }
    named = [(name, parameter(*shape)) for name, shape in names.items()]
    named.append(("q_proj.bias", parameter(8)))
    whole, heads = per_head([{"params": named, "lr": 0.5}], rows={"q_proj": 4})
    assert whole == {"params": named[1:], "lr": 0.5}
    assert heads == {
        "params": named[:1],
        "lr": 0.5,
        "matrix_layout": "per_head",
        "head_rows": 4,
    }


def test_a_group_with_another_layout_does_not_take_the_heads_of_the_default() -> None:
    p, q = parameter(8, 4), parameter(6, 4)
    optimizer = SOAP(
        [{"params": [p]}, {"params": [q], "matrix_layout": "tensor"}],
        matrix_layout="per_head",
        head_rows=4,
    )
    assert [group["head_rows"] for group in optimizer.param_groups] == [4, None]
    optimizer.init_state()
    assert optimizer.state[p]["exp_avg"].shape == (2, 4, 4)
    assert optimizer.state[q]["exp_avg"].shape == (6, 4)


def test_state_of_whole_matrices_does_not_fit_heads() -> None:
    p = parameter(8, 4)
    whole = Muon([p])
    p.grad = torch.ones(8, 4)
    whole.step()
    whole.param_groups[0].update(matrix_layout="per_head", head_rows=4)
    with pytest.raises(ValueError, match=r"momentum_buffer \(8, 4\), expected \(2, 4, 4\)"):
        whole.step()
