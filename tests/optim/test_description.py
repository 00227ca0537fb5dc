"""The table of the kinds of a model's parameters."""

import torch
from torch import nn

from lather.optim import Decision, describe_parameters, parameters_by_kind


class Layer(nn.Module):
    """A layer with a matrix, a stack of experts and a parameter that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 1024, bias=False)
        self.experts = nn.ParameterDict({"up": nn.Parameter(torch.zeros(4, 8, 16))})
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


def test_the_table_has_kinds_reasons_marks_and_totals() -> None:
    with torch.device("meta"):
        decisions = describe_parameters(Model())
    assert str(decisions) == repr(decisions) == TABLE


def test_the_decisions_are_those_of_parameters_by_kind_in_the_order_of_the_model() -> None:
    model = Model()
    names = {"adam_names": ("up",), "matrix_names": ("mix",)}
    decisions = describe_parameters(model, **names)
    assert all(isinstance(each, Decision) for each in decisions)
    assert [(each.name, each.parameter) for each in decisions] == list(model.named_parameters())
    for kind, named in parameters_by_kind(model, **names).items():
        assert [(each.name, each.parameter) for each in decisions if each.kind == kind] == named


def name_column(*names: str) -> list[str]:
    decisions = describe_parameters([(name, nn.Parameter(torch.zeros(2))) for name in names])
    return [line.split()[0] for line in str(decisions).splitlines() if "(2,)" in line]


def test_numbers_of_names_that_are_alike_are_abbreviated() -> None:
    assert name_column(*(f"a.{i}.b" for i in range(0, 12, 2))) == ["a.{0,...,10}.b"]
    assert name_column(*(f"a.{i}.b.{j}" for i in range(3) for j in range(2))) == ["a.{0-2}.b.{0-1}"]
    assert name_column("a.0.b", "a1.0.b", "0") == ["a.0.b", "a1.0.b", "0"]


def test_long_names_are_broken() -> None:
    name = ".".join(["parameters_of_a_layer"] * 6)
    lines = str(describe_parameters([(name, nn.Parameter(torch.zeros(2, 3)))])).splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(line.strip() for line in lines[2:4]) == f"? {name}"
    assert lines[4].split() == ["(2,", "3)", "6"]


def test_without_parameters_there_is_a_total_alone() -> None:
    assert str(describe_parameters(nn.ReLU())) == "in all: 0 parameters, 0 elements"
