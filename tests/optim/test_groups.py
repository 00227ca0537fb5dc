"""Splitting a model's parameters into groups."""

import torch
from torch import nn

from lather.optim import SOAP, Muon, StackedSOAP, parameter_groups


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 4)
        self.positions = nn.Embedding(5, 4)
        self.mixer = nn.Linear(4, 6)
        self.experts = nn.ParameterDict(
            {"up": nn.Parameter(torch.zeros(3, 4, 6)), "bias": nn.Parameter(torch.zeros(3))}
        )
        self.convolution = nn.Conv1d(4, 4, 3, bias=False)
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
        self.lm_head = nn.Linear(4, 11, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


def named(group: dict) -> set[str]:  # type: ignore[type-arg]
    return {name for name, _ in group["params"]}


def test_each_parameter_is_claimed_once_and_by_the_right_group() -> None:
    matrices, experts, rest = parameter_groups(Tiny())
    assert named(matrices) == {"mixer.weight", "convolution.weight", "frozen"}
    assert named(experts) == {"experts.up"}
    assert named(rest) == {"embed_tokens.weight", "positions.weight", "mixer.bias", "experts.bias"}
    assert experts["matrix_layout"] == "per_expert"
    assert rest["rule"] == "adamw"


def test_other_names_for_experts_and_for_adam() -> None:
    groups = parameter_groups(Tiny(), expert_names=("convolution",), adam_names=("mixer",))
    assert [named(group) for group in groups] == [
        {"experts.up", "frozen"},
        {"convolution.weight"},
        {"embed_tokens.weight", "positions.weight", "mixer.weight", "mixer.bias", "experts.bias"},
    ]


def test_groups_make_an_optimizer_that_steps() -> None:
    model = Tiny()
    optimizer = SOAP(parameter_groups(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[model.experts["up"]]["factor_0"].shape == (3, 4, 4)
    assert "factor_0" not in optimizer.state[model.embed_tokens.weight]


def test_empty_groups_are_left_out() -> None:
    assert [group["rule"] for group in parameter_groups(nn.LayerNorm(3))] == ["adamw"]


def test_experts_may_be_stacked() -> None:
    model = Tiny()
    optimizer = StackedSOAP(parameter_groups(model, expert_layout="stacked"), 1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[model.experts["up"]]["factor_0"].shape == (12, 12)


def test_embeddings_may_have_a_basis() -> None:
    """They have it on the hidden side, also if the vocabulary is less than 8 times as long; vectors
    and matrices stay as before."""
    model = Tiny()
    optimizer = Muon(parameter_groups(model, rest_rule="embedding_soap"), lr=1e-2)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    optimizer.step()
    bases = {
        key: tuple(x.shape)
        for key, x in optimizer.state[model.embed_tokens.weight].items()
        if key.startswith("basis")
    }
    assert bases == {"basis_1": (4, 4)}
    assert optimizer.state[model.mixer.weight].keys() == {"step", "momentum_buffer"}
    assert optimizer.state[model.mixer.bias].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_the_rest_may_have_a_rate_of_its_own() -> None:
    """Without it, it has that of the optimizer."""
    for rest_lr, expected in ((3e-2, [1e-2, 1e-2, 3e-2]), (None, [1e-2, 1e-2, 1e-2])):
        optimizer = Muon(parameter_groups(Tiny(), rest_lr=rest_lr), lr=1e-2)
        assert [group["lr"] for group in optimizer.param_groups] == expected
        assert optimizer.param_groups[-1]["rule"] == "adamw"
