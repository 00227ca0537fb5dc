"""Splitting a model's parameters into groups, and the table of their kinds."""

from typing import Any

import torch
from optim_helpers import give_gradients
from torch import nn

from lather.optim import (
    SOAP,
    Decision,
    Muon,
    StackedSOAP,
    describe_parameters,
    parameter_groups,
    parameters_by_kind,
)
from lather.optim.batched.formats import packed_shape


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 4)
        self.positions = nn.Embedding(5, 4)
        self.mixer = nn.Linear(4, 6)
        self.experts = nn.ParameterDict({"up": torch.zeros(3, 4, 6), "bias": torch.zeros(3)})
        self.convolution = nn.Conv1d(4, 4, 3, bias=False)
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
        self.lm_head = nn.Linear(4, 11, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


def names_of(groups: list[dict[str, Any]]) -> list[set[str]]:
    return [{name for name, _ in group["params"]} for group in groups]


def test_each_parameter_is_claimed_once_and_by_the_right_group() -> None:
    groups = parameter_groups(Tiny())
    assert names_of(groups) == [
        {"mixer.weight", "convolution.weight", "frozen"},
        {"experts.up"},
        {"embed_tokens.weight", "positions.weight", "mixer.bias", "experts.bias"},
    ]
    assert [group["matrix_layout"] for group in groups] == ["tensor", "per_expert", "tensor"]
    assert groups[2]["rule"] == "adamw"
    groups = parameter_groups(Tiny(), expert_names=("convolution",), adam_names=("mixer",))
    assert names_of(groups) == [
        {"experts.up", "frozen"},
        {"convolution.weight"},
        {"embed_tokens.weight", "positions.weight", "mixer.weight", "mixer.bias", "experts.bias"},
    ]
    assert [group["rule"] for group in parameter_groups(nn.LayerNorm(3))] == ["adamw"]


def states_of(cls: Any, **options: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Take a step of the groups of a model; return the shapes of the state by parameter."""
    model = Tiny()
    optimizer = cls(parameter_groups(model, **options), lr=1e-2)
    give_gradients(model.parameters(), 0)
    optimizer.step()
    return {
        name: {key: tuple(x.shape) for key, x in optimizer.state[p].items()}
        for name, p in model.named_parameters()
    }


def test_groups_make_an_optimizer_that_steps() -> None:
    states = states_of(SOAP)
    assert states["experts.up"]["factor_0"] == (3, *packed_shape(4))
    assert "factor_0" not in states["embed_tokens.weight"]
    stacked = states_of(StackedSOAP, expert_layout="stacked")
    assert stacked["experts.up"]["factor_0"] == packed_shape(12)


def test_embeddings_may_have_a_basis() -> None:
    """They have it on the hidden side, also if the vocabulary is less than 8 times as long; vectors
    and matrices stay as before."""
    states = states_of(Muon, rest_rule="embedding_soap")
    bases = {key: x for key, x in states["embed_tokens.weight"].items() if key.startswith("basis")}
    assert bases == {"basis_1": (4, 4)}
    assert states["mixer.weight"].keys() == {"step", "momentum_buffer"}
    assert states["mixer.bias"].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_the_rest_may_have_a_rate_of_its_own() -> None:
    """Without it, it has that of the optimizer."""
    for rest_lr, expected in ((3e-2, [1e-2, 1e-2, 3e-2]), (None, [1e-2, 1e-2, 1e-2])):
        optimizer = Muon(parameter_groups(Tiny(), rest_lr=rest_lr), lr=1e-2)
        assert [group["lr"] for group in optimizer.param_groups] == expected


# --- the table ------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer with a matrix, a stack of experts and a parameter that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 1024, bias=False)
        self.experts = nn.ParameterDict({"up": torch.zeros(4, 8, 16)})
        self.mix = nn.Parameter(torch.zeros(3, 3))


class Model(nn.Module):
    """Four layers, the last of them frozen, between an embedding and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 256)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(256)
        self.layers[3].requires_grad_(False)


TABLE = """\
matrices: 8 parameters, 1,048,612 elements
  weight of nn.Linear
    layers.{0-2}.up.weight                              3 x (1024, 256)   786.4K
  - layers.3.up.weight                                      (1024, 256)   262.1K
  guess: neither owner nor name says what it is
  ? layers.{0-2}.mix                                         3 x (3, 3)       27
  ? layers.3.mix                                                 (3, 3)        9

experts: 4 parameters, 2,048 elements
  a stack of matrices, and 'experts' is in expert_names
    layers.{0-2}.experts.up                              3 x (4, 8, 16)    1,536
  - layers.3.experts.up                                      (4, 8, 16)      512

rest: 3 parameters, 26,112 elements
  of nn.Embedding
    words.weight                                             (100, 256)    25.6K
  fewer than two dims
    norm.weight                                                  (256,)      256
    norm.bias                                                    (256,)      256

in all: 15 parameters, 1,076,772 elements
  ? a guess: 4 parameters, 36 elements
  - frozen: 3 parameters, 262,665 elements"""


def test_the_table_has_kinds_reasons_runs_marks_and_totals() -> None:
    decisions = describe_parameters(Model())
    assert str(decisions) == repr(decisions) == TABLE
    assert str(describe_parameters(nn.ReLU())) == "in all: 0 parameters, 0 elements"


def test_the_decisions_are_those_of_parameters_by_kind_in_the_order_of_the_model() -> None:
    model, names = Model(), {"adam_names": ("up",), "matrix_names": ("mix",)}
    decisions = describe_parameters(model, **names)
    assert all(isinstance(each, Decision) for each in decisions)
    assert [(each.name, each.parameter) for each in decisions] == list(model.named_parameters())
    for kind, named in parameters_by_kind(model, **names).items():
        assert [(each.name, each.parameter) for each in decisions if each.kind == kind] == named


def test_numbers_of_a_run_are_abbreviated() -> None:
    for names, expected in (
        ([f"a.{i}.b" for i in range(0, 12, 2)], ["a.{0,...,10}.b"]),
        ([f"a.{i}.b.{j}" for i in range(3) for j in range(2)], ["a.{0-2}.b.{0-1}"]),
        (["a.0.b", "a1.0.b", "0"], ["a.0.b", "a1.0.b", "0"]),
    ):
        table = str(describe_parameters([(name, nn.Parameter(torch.zeros(2))) for name in names]))
        assert [line.split()[0] for line in table.splitlines() if "(2,)" in line] == expected


def test_long_names_are_broken_at_dots() -> None:
    name = ".".join(["parameters_of_a_layer"] * 6)
    lines = str(describe_parameters([(name, nn.Parameter(torch.zeros(2, 3)))])).splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(line.strip() for line in lines[2:4]) == f"? {name}"
    assert lines[4].split() == ["(2,", "3)", "6"]
