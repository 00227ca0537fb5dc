"""Multi-token prediction against the paper's formulas, in fp64: losses and every gradient, with
packed documents, padding and labels that are left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lather.config.toml_file import model_of
from lather.errors import ExchangeError
from lather.models.decoder import Decoder
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import model_from_hugging_face, read_config
from lather.models.mtp import look_ahead
from models.mtp_paper import Span, paper_losses
from models.tiny import SIZES, error, gradients, tiny_family_config, tiny_family_model

CONFIGS = {
    family: tiny_family_config(family, num_nextn_predict_layers=2)
    for family in ("deepseek_v3", "glm4_moe")
}
ENDS = [[1, 4, 5, 9], [2, 8]]
"""Ends of the documents of two sequences of 9 positions; the second has padding behind."""
DOCUMENTS = [
    (row, start, stop)
    for row, ends in enumerate(ENDS)
    for start, stop in zip([0, *ends], ends, strict=False)
]


@pytest.fixture(params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def mtp_model(family: str = "deepseek_v3", depths: int = 2) -> Decoder:
    return tiny_family_model(family, num_nextn_predict_layers=depths).double()


def batch() -> tuple[Tensor, Tensor]:
    """Draw tokens and labels, a third of which are left out."""
    generator = torch.Generator().manual_seed(1)
    tokens_BS = torch.randint(SIZES["vocab_size"], (2, 10), generator=generator)
    left_out_BS = torch.rand(2, 9, generator=generator) < 1 / 3
    return tokens_BS[:, :-1], tokens_BS[:, 1:].masked_fill(left_out_BS, -100)


@pytest.mark.parametrize("memory", ["saved", "recompute", "reference"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_losses_and_gradients_are_the_papers(family: str, memory: str, is_packed: bool) -> None:
    model, plain = mtp_model(family), mtp_model(family)
    plain.set_memory("reference")
    model.set_memory(memory)
    tokens_BS, labels_BS = batch()
    documents: list[Span] = [(0, 0, 9), (1, 0, 9)]
    cu_seqlens = padding_BS = None
    if is_packed:
        documents = DOCUMENTS
        cu_seqlens = torch.tensor([0, *ENDS[0], *(9 + end for end in ENDS[1]), 18])
        padding_BS = torch.zeros(2, 9, dtype=torch.bool)
        padding_BS[1, 8] = True
        labels_BS[1, 8] = -100
    expected = paper_losses(plain, tokens_BS, labels_BS, documents)
    expected.total(0.3).backward()

    output = model(tokens_BS, labels_BS, cu_seqlens=cu_seqlens, padding_BS=padding_BS)
    assert output.loss is not None
    found = [output.loss, *output.mtp_losses]
    means = [loss / number for loss, number in zip(found, expected.numbers, strict=True)]
    (means[0] + 0.3 / 2 * (means[1] + means[2])).backward()
    for loss, total in zip(found, expected.sums, strict=True):
        assert error(loss, total) < 1e-13
    for (name, gradient), other in zip(
        gradients(model).items(), gradients(plain).values(), strict=True
    ):
        assert error(gradient, other) < 1e-12, name
    chosen = SIZES["num_experts_per_tok"]
    rows = [int(routing.count_E.sum()) // chosen for routing in output.routings]
    assert rows[-2:] == expected.rows[1:]


def test_evaluation_and_logits_are_those_of_the_main_model() -> None:
    model = mtp_model()
    main = mtp_model(depths=0)
    main.load_state_dict(model.state_dict(), strict=False)
    tokens_BS, labels_BS = batch()
    assert torch.equal(model(tokens_BS).logits_BSV, main(tokens_BS).logits_BSV)
    model.eval()
    output = model(tokens_BS, labels_BS)
    assert torch.equal(output.loss, main(tokens_BS, labels_BS).loss)
    assert not output.mtp_losses


def test_a_depth_sees_nothing_behind_its_document() -> None:
    tokens_BS, labels_BS = torch.arange(6)[None], torch.arange(1, 7)[None]
    documents_BS = torch.tensor([[0, 0, 0, 1, 1, 2]])
    padding_BS = torch.tensor([[False] * 5 + [True]])
    later_BS, later_labels_BS, missing_BS = look_ahead(
        tokens_BS, labels_BS, 1, documents_BS, padding_BS
    )
    assert later_BS[~missing_BS].tolist() == [1, 2, 4]
    assert later_labels_BS.tolist() == [[2, 3, -100, 5, -100, -100]]
    assert look_ahead(tokens_BS, labels_BS, 8)[2].all()


# --- published folders ----------------------------------------------------------------------------

OF_A_DEPTH = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
OF_DEPTHS = ("model.layers.3.", "model.layers.4.")
NOT_COMPARED = "layers.3.embed_tokens.weight' and 3 more, copies .* are not read or compared: "
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    """A folder of a model of three blocks and two depths."""
    save_hugging_face(mtp_model(family).float(), CONFIGS[family], tmp_path / "published")
    return tmp_path / "published"


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def set_depths(folder: Path, number: int) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**fields, "num_nextn_predict_layers": number}), "utf-8")


def test_a_folder_has_the_published_names_and_comes_back_to_the_bit(
    family: str, folder: Path
) -> None:
    tensors = stored(folder)
    block = {name.removeprefix("model.layers.2.") for name in tensors if ".layers.2." in name}
    for layer in (3, 4):
        start = f"model.layers.{layer}."
        names = {name.removeprefix(start) for name in tensors if name.startswith(start)}
        assert names == {*block, *OF_A_DEPTH, *COPIES}
        originals = ("model.embed_tokens.weight", "lm_head.weight")
        for copy, original in zip(COPIES, originals, strict=True):
            assert torch.equal(tensors[start + copy], tensors[original])
    assert not any(".layers.5." in name for name in tensors)
    altered = {f"model.layers.3.{copy}": torch.zeros(1) for copy in COPIES}
    save_file({**tensors, **altered}, folder / "model.safetensors")
    with pytest.warns(UserWarning, match=NOT_COMPARED):
        again, config = model_from_hugging_face(folder)
    assert config == CONFIGS[family]
    expected = mtp_model(family).float().state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in again.state_dict().items())


def test_transformers_leaves_the_blocks_out(family: str, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager"
    )
    assert all(name.startswith(OF_DEPTHS) for name in info["unexpected_keys"])
    assert not info["missing_keys"]
    tokens_BS, _ = batch()
    with torch.no_grad():
        logits_BSV = mtp_model(family).float()(tokens_BS).logits_BSV
        assert error(logits_BSV, theirs(tokens_BS).logits) < 1e-5


@pytest.mark.filterwarnings("ignore:.* copies of embedding and head for multi-token")
@pytest.mark.parametrize("number", [0, 1])
def test_blocks_that_the_configuration_leaves_out_are_not_read(
    family: str, folder: Path, number: int
) -> None:
    set_depths(folder, number)
    with pytest.warns(UserWarning, match="blocks of multi-token prediction, .* are left out"):
        model, config = model_from_hugging_face(folder)
    assert config == replace(CONFIGS[family], num_nextn_predict_layers=number)
    tokens_BS, _ = batch()
    expected = mtp_model(family).float()(tokens_BS).logits_BSV
    assert torch.equal(model(tokens_BS).logits_BSV, expected)
    assert len(model.layers) == 3 + number


@pytest.mark.filterwarnings("ignore:.* multi-token prediction")
def test_missing_blocks_and_surplus_tensors_are_refused(folder: Path) -> None:
    tensors = stored(folder)
    file = folder / "model.safetensors"
    save_file({**tensors, "model.layers.3.gate.weight": torch.zeros(2)}, file)
    with pytest.raises(ExchangeError, match=r"has a surplus 'model.layers.3.gate.weight'"):
        model_from_hugging_face(folder)
    save_file({name: x for name, x in tensors.items() if OF_DEPTHS[1] not in name}, file)
    remedy = r"give the weights that belong to it, or set its num_nextn_predict_layers to 0$"
    with pytest.raises(ExchangeError, match=rf"lacks 'model.layers.4.*{remedy}"):
        model_from_hugging_face(folder)
    set_depths(folder, 1)
    model_from_hugging_face(folder)


def test_counted_blocks_without_any_tensor_are_left_out(family: str, folder: Path) -> None:
    """As transformers saves DeepSeek-V3. An index tells it without its files."""
    main = {name: x for name, x in stored(folder).items() if not name.startswith(OF_DEPTHS)}
    save_file(main, folder / "model.safetensors")
    expected = replace(CONFIGS[family], num_nextn_predict_layers=0)
    with pytest.warns(UserWarning, match="has no tensor of the blocks of multi-token prediction"):
        model, config = model_from_hugging_face(folder)
    assert config == expected == read_config(folder) == model_of(str(folder))
    tokens_BS, _ = batch()
    logits_BSV = mtp_model(family).float()(tokens_BS).logits_BSV
    assert torch.equal(model(tokens_BS).logits_BSV, logits_BSV)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for names, depths in [([*main], 0), ([*main, "model.layers.4.eh_proj.weight"], 2), ([], 2)]:
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "of.safetensors")}))
        assert read_config(folder).num_nextn_predict_layers == depths
    index.unlink()
    assert read_config(folder) == CONFIGS[family]
