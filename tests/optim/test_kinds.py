"""Kinds of parameters: names given, the owner, the shape and the name decide, in this order."""

import warnings

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from lather.optim import Muon, describe_parameters, parameter_groups, parameters_by_kind
from lather.optim.groups import ADAM_NAMES


def with_parameters(class_name: str = "Plain", **shapes: tuple[int, ...]) -> nn.Module:
    """Make a module, of a class of this name, that owns parameters of these names and shapes."""
    module: nn.Module = type(class_name, (nn.Module,), {})()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


def kinds_of(model: object, **names: tuple[str, ...]) -> dict[str, str]:
    """Return the kind of each parameter by its name; a guess has a question mark."""
    decisions = describe_parameters(model, **names)  # type: ignore[arg-type]
    return {each.name: f"{each.kind}{'?' * each.is_guess}" for each in decisions}


class Subclass(nn.Embedding):
    """An embedding of somebody else's library."""


REST = {
    "embedding": (nn.Embedding(9, 4), "weight", "of nn.Embedding"),
    "embedding bag": (nn.EmbeddingBag(9, 4), "weight", "of nn.EmbeddingBag"),
    "subclass of an embedding": (Subclass(9, 4), "weight", "of nn.Embedding"),
    "Megatron's embedding": (
        with_parameters("VocabParallelEmbedding", weight=(9, 4)),
        "weight",
        "says embedding",
    ),
    "layer normalization of two dims": (nn.LayerNorm((3, 4)), "weight", "says norm"),
    "another library's normalization": (
        with_parameters("FusedRMSNormGated", weight=(3, 4)),
        "weight",
        "says norm",
    ),
    "normalization that is called as a network": (
        with_parameters("ConvNextLayerNorm", weight=(3, 4)),
        "weight",
        "says norm",
    ),
    "row of gains": (with_parameters(weight=(1, 8)), "weight", "one dim is longer"),
    "gains of a class that is called as a convolution": (
        with_parameters("ConvNextV2GRN", weight=(1, 1, 1, 8)),
        "weight",
        "one dim is longer",
    ),
    "gains of channels": (with_parameters(weight=(1, 8, 1, 1)), "weight", "one dim is longer"),
    "depthwise": (nn.Conv1d(6, 6, 3, groups=6), "weight", "depthwise"),
    "depthwise with a multiplier": (nn.Conv2d(6, 12, 3, groups=6), "weight", "depthwise"),
    "depthwise transposed": (nn.ConvTranspose3d(6, 6, 3, groups=6), "weight", "depthwise"),
    "biases of attention": (
        nn.MultiheadAttention(8, 2, add_bias_kv=True),
        "bias_k",
        "one dim is longer",
    ),
    "lengths under weight normalization": (
        parametrizations.weight_norm(nn.Linear(4, 6)),
        "parametrizations.weight.original0",
        "one dim is longer",
    ),
}
MATRICES = {
    "linear": (nn.Linear(4, 6), "weight", "of nn.Linear"),
    "linear to one number": (nn.Linear(4, 1), "weight", "of nn.Linear"),
    "linear from one number": (nn.Linear(1, 4), "weight", "of nn.Linear"),
    "bilinear": (nn.Bilinear(4, 5, 6), "weight", "of nn.Bilinear"),
    "convolution": (nn.Conv2d(3, 6, 3), "weight", "of nn.Conv2d"),
    "convolution of one channel": (nn.Conv1d(1, 6, 3), "weight", "of nn.Conv1d"),
    "pointwise convolution to one channel": (nn.Conv2d(6, 1, 1), "weight", "of nn.Conv2d"),
    "grouped convolution": (nn.Conv1d(6, 6, 3, groups=2), "weight", "grouped convolution"),
    "attention": (nn.MultiheadAttention(8, 2), "in_proj_weight", "of nn.MultiheadAttention"),
    "attention with other keys": (
        nn.MultiheadAttention(8, 2, kdim=4),
        "k_proj_weight",
        "of nn.MultiheadAttention",
    ),
    "recurrent": (nn.LSTM(4, 1), "weight_hh_l0", "of nn.LSTM"),
    "recurrent cell": (nn.GRUCell(4, 6), "weight_ih", "of nn.GRUCell"),
    "GPT-2's linear map": (with_parameters("Conv1D", weight=(4, 6)), "weight", "of Conv1D"),
    "Transformer Engine's linear map": (
        with_parameters("TELayerNormColumnParallelLinear", weight=(4, 6), layer_norm_weight=(6,)),
        "weight",
        "of TELayerNormColumnParallelLinear",
    ),
    "Transformer Engine's two maps": (
        with_parameters("LayerNormMLP", fc1_weight=(4, 6)),
        "fc1_weight",
        "of LayerNormMLP",
    ),
    "rows under weight normalization": (
        parametrizations.weight_norm(nn.Linear(4, 6)),
        "parametrizations.weight.original1",
        "of nn.Linear",
    ),
    "orthogonal": (
        parametrizations.orthogonal(nn.Linear(4, 4)),
        "parametrizations.weight.original",
        "of nn.Linear",
    ),
    "rotated table": (with_parameters("PreNormBlock", w_qkv=(4, 12)), "w_qkv", "matrix product"),
}


@pytest.mark.parametrize("case", REST)
def test_the_owner_or_the_shape_says_that_it_is_no_matrix(case: str) -> None:
    module, name, reason = REST[case]
    (decision,) = [each for each in describe_parameters(module) if each.name == name]
    assert (decision.kind, decision.is_guess) == ("rest", False)
    assert reason in decision.reason


@pytest.mark.parametrize("case", MATRICES)
def test_the_owner_says_that_it_is_a_matrix(case: str) -> None:
    module, name, reason = MATRICES[case]
    (decision,) = [each for each in describe_parameters(module) if each.name == name]
    assert (decision.kind, decision.is_guess) == ("matrices", False)
    assert reason in decision.reason


BARE_REST = {
    "pos_embed": (1, 5, 8),
    "position_embeddings": (5, 8),
    "relative_position_bias_table": (49, 4),
    "relPosH": (13, 8),
    "rel_pos_w": (13, 8),
    "pos_bias_u": (4, 8),
    "cls_token": (1, 1, 8),
    "register_tokens": (4, 8),
    "prompts": (4, 8),
    "mask_embedding": (2, 8),
    "query_tokens": (1, 4, 8),
    "latents": (6, 8),
    "codebook": (64, 8),
    "A_log": (8, 4),
    "A_logs": (8, 4),
    "Ds": (4, 8),
    "log_dt": (8, 4),
    "dt_bias": (4, 8),
    "time_decay": (4, 8),
    "sinks": (4, 8),
    "layer_scale": (2, 8),
    "lambda_1": (2, 8),
    "temperature": (4, 8),
    "router_bias": (2, 8),
    "e_score_correction_bias": (2, 8),
    "gamma": (8, 1, 1),
    "layer_norm_weight": (2, 8),
    "pos_weight": (5, 8),
    "weight_scale_inv": (4, 8),
    "memory": (1, 5, 8),
}
BARE_MATRICES = {
    "w1": (8, 6),
    "w_gate": (8, 6),
    "Wq": (8, 6),
    "kernel": (8, 1),
    "weight": (8, 6),
    "in_proj_weight": (8, 6),
    "text_projection": (8, 6),
    "qkvProj": (8, 24),
    "time_decay_w1": (8, 6),
    "rel_pos_proj": (8, 6),
    "latent_proj": (8, 6),
    "query_weight": (8, 6),
    "lora_A": (1, 8),
    "lora_B": (8, 1),
    "up": (8, 6),
}


def test_names_of_bare_parameters_decide() -> None:
    assert kinds_of(with_parameters(**BARE_REST)) == dict.fromkeys(BARE_REST, "rest")
    assert kinds_of(with_parameters(**BARE_MATRICES)) == dict.fromkeys(BARE_MATRICES, "matrices")
    guesses = kinds_of(with_parameters(mix=(8, 6), query=(4, 8), A=(8, 4)))
    assert guesses == {"mix": "matrices?", "query": "rest?", "A": "matrices?"}


@pytest.mark.parametrize("name", ["query_key_value", "qkv", "kv", "queryKeyValue", "query_key"])
@pytest.mark.parametrize("shape", [(4, 12), (12, 4, 1)], ids=str)
def test_projections_of_attention_in_one_matrix_are_matrices(
    name: str,
    shape: tuple[int, ...],
) -> None:
    assert kinds_of(with_parameters(**{name: shape})) == {name: "matrices"}
    path = f"h.0.{name}"
    assert kinds_of([(path, nn.Parameter(torch.zeros(shape)))]) == {path: "matrices"}


@pytest.mark.parametrize("name", ["token_mixer", "tokenMixer", "prompt_key", "token_shift_2"])
def test_what_a_name_says_of_tokens_and_something_else_is_a_guess(name: str) -> None:
    assert kinds_of(with_parameters(**{name: (4, 6)})) == {name: "rest?"}
    known = dict.fromkeys(("cls_token", "prompt_tokens", "register_tokens_2"), (4, 6))
    assert kinds_of(with_parameters(**known)) == dict.fromkeys(known, "rest")


def test_parameters_in_containers_are_judged_by_the_containers_name() -> None:
    module = nn.Module()
    module.relative_position_bias_tables = nn.ParameterList([torch.zeros(9, 4) for _ in range(2)])
    module.maps = nn.ParameterDict({"w1": torch.zeros(4, 6), "cls_token": torch.zeros(2, 6)})
    assert kinds_of(module) == {
        "relative_position_bias_tables.0": "rest",
        "relative_position_bias_tables.1": "rest",
        "maps.cls_token": "rest",
        "maps.w1": "matrices",
    }


def test_old_weight_normalization_keeps_lengths_and_rows_apart() -> None:
    with pytest.warns(FutureWarning):
        module = weight_norm(nn.Linear(4, 6))
    assert kinds_of(module) == {"bias": "rest", "weight_g": "rest", "weight_v": "matrices"}


class Tied(nn.Module):
    """A head of another name that has the embedding's weight, and one that has not."""

    def __init__(self) -> None:
        super().__init__()
        self.readout, self.words = nn.Linear(4, 9, bias=False), nn.Embedding(9, 4)
        self.readout.weight = self.words.weight
        self.again = self.readout
        self.embed_out = nn.Linear(4, 9, bias=False)


class Told(Tied):
    """The same as a Hugging Face model, inside of which is a model of patches without words."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Patches()

    def get_output_embeddings(self) -> nn.Module:
        return self.embed_out


class Patches(nn.Module):
    """A model whose input embedding is a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.patches

    def get_output_embeddings(self) -> nn.Module:
        raise NotImplementedError


def test_tied_weights_occur_once_and_are_embeddings() -> None:
    assert kinds_of(Tied()) == {"readout.weight": "rest", "embed_out.weight": "matrices?"}


def test_a_model_tells_its_head_also_inside_of_another() -> None:
    expected = {
        "readout.weight": "rest",
        "embed_out.weight": "rest",
        "vision.patches.weight": "matrices",
        "vision.patches.bias": "rest",
    }
    assert kinds_of(Told()) == expected
    assert kinds_of(nn.Sequential(Told())) == {f"0.{name}": kind for name, kind in expected.items()}
    assert "get_output_embeddings()" in describe_parameters(Told())[1].reason


def test_adam_and_matrix_and_router_names_of_the_caller_come_first() -> None:
    mlp = nn.ModuleDict({"gate": nn.Linear(4, 2), "mix": with_parameters(a=(4, 4))})
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "mlp": mlp})
    assert kinds_of(model, adam_names=("mlp.gate.weight",))["mlp.gate.weight"] == "rest"
    assert kinds_of(model, adam_names=("gate.weigh", "lp.gate"))["mlp.gate.weight"] == "matrices"
    assert kinds_of(model, matrix_names=("words", "mix", "gate")) == {
        "words.weight": "matrices",
        "mlp.gate.weight": "matrices",
        "mlp.gate.bias": "rest",
        "mlp.mix.a": "matrices",
    }
    assert kinds_of(model, router_names=("gate",), adam_names=("mlp",))["mlp.gate.bias"] == "router"


def test_stacks_of_experts_without_their_vectors() -> None:
    stacks = {"up": (3, 4, 6), "one": (1, 4, 6), "narrow": (3, 1, 6)}
    vectors = {"up_bias": (3, 6), "bias": (3, 1, 6), "norm_weight": (3, 1, 4)}
    model = nn.ModuleDict({"experts": with_parameters(**stacks, **vectors)})
    model["shared"] = nn.ModuleDict({"experts": nn.Sequential(nn.Linear(4, 6, bias=False))})
    assert kinds_of(model) == {
        "experts.up": "experts",
        "experts.up_bias": "rest",
        "experts.bias": "rest",
        "experts.norm_weight": "rest",
        "experts.one": "experts",
        "experts.narrow": "experts",
        "shared.experts.0.weight": "matrices",
    }


def test_stacks_of_experts_by_another_name_are_a_guess() -> None:
    """Muon would leave them, most of a model, to AdamW without a word."""
    shapes = {"up": (3, 4, 6), "bias": (3, 6), "pos_embed": (1, 4, 6)}
    model = nn.ModuleDict({"moe": with_parameters("Blocks", **shapes)})
    assert kinds_of(model) == {"moe.up": "matrices?", "moe.bias": "rest", "moe.pos_embed": "rest"}
    assert "expert_names" in describe_parameters(model)[0].reason
    assert kinds_of(model, expert_names=("moe",))["moe.up"] == "experts"


def test_heads_by_their_names_are_a_guess_outside_of_layers() -> None:
    names = ("output", "head", "ctc_head", "classifier", "to_logits", "embed_out")
    model = nn.ModuleDict({name: nn.Linear(4, 9, bias=False) for name in names})
    assert kinds_of(model) == {f"{name}.weight": "matrices?" for name in names}
    others = ("enc_output", "header", "up")
    model = nn.ModuleDict({name: nn.Linear(4, 9, bias=False) for name in others})
    model["layers"] = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(4, 4, bias=False)})])
    expected = [*(f"{name}.weight" for name in others), "layers.0.output.weight"]
    assert kinds_of(model) == dict.fromkeys(expected, "matrices")


def test_named_parameters_are_judged_by_shape_and_name() -> None:
    shapes = {
        "blocks.0.attn.q_proj.weight": (8, 8),
        "blocks.0.attn.bias": (8,),
        "blocks.0.mlp.0.weight": (8, 8),
        "blocks.0.q_proj.weight": (1, 8),
        "blocks.0.gate.weight": (1, 8),
        "blocks.0.lora.A": (1, 8),
        "q_proj.lora_A.default.weight": (1, 8),
        "pos_embed": (1, 5, 8),
        "wte.weight": (9, 8),
        "blocks.0.norm.weight": (2, 8),
        "conv1d.weight": (8, 1, 4),
        "score.weight": (2, 8),
        "one.weight": (1, 8),
        "tables.0": (2, 8),
        "latents.0": (4, 8),
    }
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    guesses = {
        "wte.weight": "rest?",
        "blocks.0.norm.weight": "rest?",
        "conv1d.weight": "rest?",
        "score.weight": "matrices?",
        "one.weight": "rest?",
        "tables.0": "matrices?",
    }
    rest = dict.fromkeys(("blocks.0.attn.bias", "pos_embed", "latents.0"), "rest")
    assert kinds_of(named) == {**dict.fromkeys(list(shapes)[:7], "matrices"), **rest, **guesses}


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


def test_wrapped_models_have_the_same_kinds() -> None:
    """Under `torch.compile`, and on the meta device."""
    with torch.device("meta"):
        whole = Whole()
    expected = kinds_of(whole)
    assert expected == {
        "words.weight": "rest",
        "positions": "rest",
        "first.weight": "matrices",
        "first.bias": "rest",
        "norm.weight": "rest",
        "norm.bias": "rest",
        "conv.weight": "rest",
        "conv.bias": "rest",
        "mix": "matrices?",
    }
    compiled = {f"_orig_mod.{name}": kind for name, kind in expected.items()}
    assert kinds_of(torch.compile(whole)) == compiled


def test_adapters_of_rank_one_are_matrices_and_those_of_an_embedding_are_none() -> None:
    options = {"target_modules": ["words", "first"], "modules_to_save": ["conv"], "use_dora": True}
    kinds = kinds_of(peft.get_peft_model(Whole(), peft.LoraConfig(r=1, **options)))
    prefix = "base_model.model."
    assert {name.removeprefix(prefix): kinds[name] for name in kinds if "default" in name} == {
        "words.lora_magnitude_vector.default.weight": "rest",
        "words.lora_embedding_A.default": "rest",
        "words.lora_embedding_B.default": "rest",
        "first.lora_A.default.weight": "matrices",
        "first.lora_B.default.weight": "matrices",
        "first.lora_magnitude_vector.default.weight": "rest",
        "conv.modules_to_save.default.weight": "rest",
        "conv.modules_to_save.default.bias": "rest",
    }


def test_scaling_vectors_and_singular_values_of_peft_are_no_matrices() -> None:
    scaling = peft.IA3Config(target_modules=["first"], feedforward_modules=[])
    scaled = kinds_of(peft.get_peft_model(Whole(), scaling))
    assert scaled["base_model.model.first.ia3_l.default"] == "rest"
    adapting = peft.AdaLoraConfig(init_r=2, total_step=9, target_modules=["first"])
    adaptive = kinds_of(peft.get_peft_model(Whole(), adapting))
    own = {name.split(".")[-2]: kind for name, kind in adaptive.items() if ".lora_" in name}
    assert own == {"lora_A": "matrices", "lora_B": "matrices", "lora_E": "rest"}


def test_one_warning_names_the_guesses_and_the_remedy() -> None:
    model = nn.ModuleDict({f"block{i}": nn.Sequential(Whole(), nn.Linear(4, 4)) for i in range(2)})
    with pytest.warns(UserWarning, match="is a guess") as caught:
        parameters_by_kind(model)
    (warning,) = caught
    assert warning.filename == __file__
    message = str(warning.message)
    assert "block0.0.mix" in message
    adam_names = ", ".join(map(repr, (*ADAM_NAMES, "mix")))
    assert f"matrix_names=('mix',) or adam_names=({adam_names})" in message
    with pytest.warns(UserWarning, match="is a guess") as caught:
        parameter_groups(model)
    assert [warning.filename for warning in caught] == [__file__]
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
    model = nn.ModuleList(with_parameters(**shapes) for _ in range(3))
    with pytest.warns(UserWarning, match=r"\{0-2\}\.a0b .*; and 3 more\. Say"):
        parameters_by_kind(model)


def test_groups_leave_depthwise_filters_and_tables_to_adamw() -> None:
    model = Whole()
    optimizer = Muon(parameter_groups(model, matrix_names=("mix",)), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in (model.conv.weight, model.positions, model.norm.weight, model.words.weight):
        assert "exp_avg_sq" in optimizer.state[p]
    assert optimizer.state[model.mix].keys() == {"step", "momentum_buffer"}


@pytest.mark.parametrize("call", [parameters_by_kind, parameter_groups, describe_parameters])
def test_bad_input_gets_an_error_with_the_remedy(call) -> None:  # type: ignore[no-untyped-def]
    model = nn.Linear(2, 3)
    with pytest.raises(TypeError, match=r"a Parameter has no name.*model\.named_parameters\(\)"):
        call(model.parameters())
    with pytest.raises(TypeError, match=r"='head' must be .* adam_names=\('head',\)"):
        call(model, adam_names="head")
    with pytest.raises(TypeError, match=r"matrix_names=\(3,\) must be"):
        call(model, matrix_names=(3,))
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: run the model once"):
        call(nn.Sequential(nn.LazyLinear(3)))
