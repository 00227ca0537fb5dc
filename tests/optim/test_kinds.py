"""Kinds of parameters: names given, the owner, the shape and the name decide, in this order.

    PYTHONPATH=tests:tests/optim python tests/optim/test_kinds.py

writes into `kinds.txt` what is decided now about the models there, and why; review the difference.
A guess has a question mark."""

import re
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from corpus import Recorded, entries, record
from optim_helpers import give_gradients
from torch import Tensor, nn

from lather.models.adapted import add_adapters
from lather.models.families import FAMILIES, build_model
from lather.models.lora import LoraConfig
from lather.optim import Decision, Muon, describe_parameters, parameter_groups, parameters_by_kind
from lather.optim.groups import ADAM_NAMES

FILE = Path(__file__).with_name("kinds.txt")

# Parts of configurations of `transformers`
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {**SIZES, "vocab_size": 96}
IMAGES = {**SIZES, "image_size": 16, "patch_size": 8}
EXPERTS = {**TEXT, "num_key_value_heads": 2, "num_experts_per_tok": 2}
STATES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}


def owned(class_name: str = "Plain", **shapes: tuple[int, ...]) -> nn.Module:
    """Make a module, of a class of this name, that owns parameters of these names and shapes."""
    module: nn.Module = type(class_name, (nn.Module,), {})()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


def named(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


class Subclass(nn.Embedding):
    """An embedding of somebody else's library."""


class Tied(nn.Module):
    """A head of another name that has the embedding's weight, and one that has not."""

    def __init__(self) -> None:
        super().__init__()
        self.readout, self.words = nn.Linear(4, 9, bias=False), nn.Embedding(9, 4)
        self.readout.weight = self.words.weight
        self.again = self.readout
        self.embed_out = nn.Linear(4, 9, bias=False)


class Patches(nn.Module):
    """A model whose input embedding is a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.patches

    def get_output_embeddings(self) -> nn.Module:
        raise NotImplementedError


class Told(Tied):
    """The same as a Hugging Face model, inside of which is a model of patches without words."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Patches()

    def get_output_embeddings(self) -> nn.Module:
        return self.embed_out


class Whole(nn.Module):
    """A model with parameters for most of the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.positions = nn.Parameter(torch.zeros(5, 4))
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm((5, 4))
        self.conv = nn.Conv1d(4, 4, 3, groups=4)
        self.mix = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(self.words(x))
        return y @ self.mix


def gated() -> nn.Module:
    mlp = nn.ModuleDict({"gate": nn.Linear(4, 2), "mix": owned(a=(4, 4))})
    return nn.ModuleDict({"words": nn.Embedding(9, 4), "mlp": mlp})


def heads(*names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(4, 9, bias=False) for name in names})


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = make()
    return model


def decided(model: Any, **names: tuple[str, ...]) -> str:
    return "; ".join(map(_said, describe_parameters(model, **names)))


def _said(decision: Decision) -> str:
    return f"{decision.name}: {decision.kind}{'?' * decision.is_guess} ({decision.reason})"


def published(architecture: str, **configuration: Any) -> nn.Module:
    """Make a model of `transformers` on the meta device."""
    cls = getattr(transformers, architecture)
    return on_meta(lambda: cls(cls.config_class(**configuration)))


def of_transformers(architecture: str, **configuration: Any) -> str:
    """Describe what is no matrix though it has two dims or more, and guesses, with # for numbers.
    Without modules, what differs is a guess, except for embeddings: their names say weight."""
    model, number = published(architecture, **configuration), r"(?<=\.)\d+(?=\.)|(?<=original)0"
    decisions, shown = describe_parameters(model), []
    assert max(map(len, str(decisions).splitlines())) <= 80
    for each, alone in zip(decisions, describe_parameters(model.named_parameters()), strict=True):
        assert alone.kind == each.kind or alone.is_guess or each.reason == "of nn.Embedding"
        if each.parameter.dim() < 2:
            assert (each.kind, each.is_guess) == ("rest", False)
        elif each.kind != "matrices" or each.is_guess:
            shown.append(re.sub(number, "#", _said(each)))
    return "; ".join(dict.fromkeys(shown))


def of_the_trainer(family: str, rank: int = 0) -> str:
    """Describe a model of the trainer, or one with adapters of this rank, by its names alone."""
    model = build_model(FAMILIES[family].config(), None, torch.device("meta"))
    if rank:
        add_adapters(model, LoraConfig(rank=rank))
    parameters, kinds = list(model.named_parameters()), dict[str, list[str]]()
    for each in describe_parameters(parameters, router_names=("gate",)):
        assert not each.is_guess
        kinds.setdefault(each.kind, []).append(re.sub(r"(?<=\.)\d+(?=\.)", "#", each.name))
    return "; ".join(f"{kind}: {', '.join(dict.fromkeys(kinds[kind]))}" for kind in sorted(kinds))


def answer_to(one: Recorded) -> str:
    names = {**globals(), "peft": peft}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(one.setup, names)
        value = eval(one.call, names)
    return value if isinstance(value, str) else decided(value)


ALL = list(entries(FILE.read_text("utf-8")))


@pytest.mark.parametrize("one", ALL, ids=str)
def test_the_kinds_of_these_models_are_decided_for_these_reasons(one: Recorded) -> None:
    assert answer_to(one) == one.answer


def test_a_head_of_any_name_is_known_by_the_models_method() -> None:
    """GPT-NeoX's head was called `embed_out` for years: the name alone allows only a guess."""
    model = published("RwkvForCausalLM", **STATES, attention_hidden_size=32)
    model.embed_out = model.head
    del model.head
    model.get_output_embeddings = lambda: model.embed_out
    for named, is_guess in ((model, False), (model.named_parameters(), True)):
        (head,) = [each for each in describe_parameters(named) if "embed_out" in each.name]
        assert (head.kind, head.is_guess) == ("rest", is_guess)


def test_one_warning_names_the_guesses_and_the_remedy() -> None:
    model = nn.ModuleDict({f"block{i}": nn.Sequential(Whole(), nn.Linear(4, 4)) for i in range(2)})
    adam_names = ", ".join(map(repr, (*ADAM_NAMES, "mix")))
    for call in (parameters_by_kind, parameter_groups):
        with pytest.warns(UserWarning, match=r"is a guess.*block0\.0\.mix") as caught:
            call(model)
        (warning,) = caught
        assert warning.filename == __file__
        assert f"matrix_names=('mix',) or adam_names=({adam_names})" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for remedy in ({"matrix_names": ("mix",)}, {"adam_names": (*ADAM_NAMES, "mix")}):
            parameters_by_kind(model, **remedy)
            parameter_groups(model, **remedy)
        model.requires_grad_(False)
        parameters_by_kind(model)
        describe_parameters(model)


def test_many_guesses_are_abbreviated() -> None:
    shapes = {f"a{i}b": (4, 4 + i) for i in range(11)}
    model = nn.ModuleList(owned(**shapes) for _ in range(3))
    with pytest.warns(UserWarning, match=r"\{0-2\}\.a0b .*; and 3 more\. Say"):
        parameters_by_kind(model)


def test_groups_leave_depthwise_filters_and_tables_to_adamw() -> None:
    model = Whole()
    optimizer = Muon(parameter_groups(model, matrix_names=("mix",)), lr=0.1)
    give_gradients(model.parameters(), 0)
    optimizer.step()
    for p in (model.conv.weight, model.positions, model.norm.weight, model.words.weight):
        assert "exp_avg_sq" in optimizer.state[p]
    assert optimizer.state[model.mix].keys() == {"step", "momentum_buffer"}


if __name__ == "__main__":
    record(FILE, answer_to)
