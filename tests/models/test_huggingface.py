"""Import and export against `transformers`: each reads what the other has saved, to the bit."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lather.errors import ExchangeError
from lather.models.families import build_model
from lather.models.hf.model_export import copy_companions, save_hugging_face
from lather.models.hf.model_folder import (
    load_hugging_face,
    model_from_hugging_face,
    open_hugging_face,
    read_config,
)
from lather.safetensors_file import copy_weights, open_safetensors
from models.tiny import error, same_tensors

pytest.importorskip("transformers")
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.published import FAMILIES, TOKENS, logits, make_model, read_back

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def ours(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits_BSV


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["", "tied"])
@pytest.mark.parametrize("max_shard_bytes", [20_000, 5 * 10**9])
def test_a_model_of_transformers_comes_back_to_the_bit(
    family: str, changes: dict[str, Any], max_shard_bytes: int, tmp_path: Path
) -> None:
    theirs = make_model(family, **changes)
    expected = logits(theirs)
    theirs.save_pretrained(tmp_path / "in", max_shard_size=max_shard_bytes)
    assert (tmp_path / "in/model.safetensors").exists() == (max_shard_bytes > 20_000)

    model, config = model_from_hugging_face(tmp_path / "in")
    assert error(ours(model), expected) < TOLERANCE
    weights, _ = open_hugging_face(tmp_path / "in")
    copy_weights(weights, tmp_path / "ours.safetensors")
    sources = {"model": model, "file": open_safetensors(tmp_path / "ours.safetensors")}
    for name, source in sources.items():
        save_hugging_face(source, config, tmp_path / name, max_shard_bytes=max_shard_bytes)
        back = read_back(tmp_path / name)
        assert same_tensors(back, theirs)
        assert torch.equal(logits(back), expected)
        assert (tmp_path / name / "model.safetensors").exists() == (max_shard_bytes > 20_000)


def test_tolerance_rejects_an_expert_that_is_one_percent_off(tmp_path: Path) -> None:
    theirs = make_model("qwen3_moe")
    theirs.save_pretrained(tmp_path / "in")
    model, _ = model_from_hugging_face(tmp_path / "in")
    with torch.no_grad():
        model.layers[0].mlp.experts.down_proj[2] *= 1.01
    assert error(ours(model), logits(theirs)) > 10 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_hold_what_the_index_says_and_are_within_their_size(
    family: str, tmp_path: Path
) -> None:
    make_model(family).save_pretrained(tmp_path / "in")
    model, config = model_from_hugging_face(tmp_path / "in")
    save_hugging_face(model, config, tmp_path / "out", max_shard_bytes=9000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    number = len(files)
    assert sorted(files) == [
        f"model-{n + 1:05d}-of-{number:05d}.safetensors" for n in range(number)
    ]
    placed = {name: file for file, tensors in files.items() for name in tensors}
    assert index["weight_map"] == placed
    sizes = {file: sum(x.nbytes for x in tensors.values()) for file, tensors in files.items()}
    size = sum(p.numel() * 4 for p in model.parameters())
    assert index["metadata"]["total_size"] == sum(sizes.values()) == size
    assert all(size <= 9000 or len(files[file]) == 1 for file, size in sizes.items())
    first = {file: name for name, file in reversed(index["weight_map"].items())}
    for file, following in itertools.pairwise(sorted(files)):  # a file has no room for the next
        assert sizes[file] + files[following][first[following]].nbytes > 9000
    assert len({placed[name] for name in placed if "layers.2.mlp.experts." in name}) > 1
    single = load_file(tmp_path / "in/model.safetensors")
    assert placed.keys() == single.keys()
    assert all(torch.equal(files[file][name], single[name]) for name, file in placed.items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_any_floating_dtype_is_read_and_written(
    family: str, stored: torch.dtype, tmp_path: Path
) -> None:
    make_model(family).to(stored).save_pretrained(tmp_path / "in")
    model, config = model_from_hugging_face(tmp_path / "in")
    assert {p.dtype for p in model.parameters()} == {stored}
    wide, _ = model_from_hugging_face(tmp_path / "in", dtype=torch.float64)
    assert same_tensors(model.double(), wide)
    save_hugging_face(wide, config, tmp_path / "same", dtype=stored)
    before, after = (load_file(tmp_path / f"{name}/model.safetensors") for name in ("in", "same"))
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name])
        assert after[name].dtype == stored
    written = json.loads((tmp_path / "same/config.json").read_text())
    assert written["dtype"] == str(stored).removeprefix("torch.")
    assert read_back(tmp_path / "same").dtype == stored


def test_loads_into_a_model_that_is_there(tmp_path: Path) -> None:
    make_model("gpt_oss").save_pretrained(tmp_path / "in")
    config = read_config(tmp_path / "in")
    model = build_model(config, torch.Generator().manual_seed(5)).to(torch.bfloat16)
    pointers = [p.data_ptr() for p in model.parameters()]
    load_hugging_face(tmp_path / "in", model)
    expected, _ = model_from_hugging_face(tmp_path / "in", dtype=torch.bfloat16)
    assert same_tensors(model, expected)
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_tied_weights_are_one_parameter_and_a_published_head_is_left_out(tmp_path: Path) -> None:
    theirs = make_model("qwen3_moe", tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path / "in")
    file = tmp_path / "in/model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    model, _ = model_from_hugging_face(tmp_path / "in")
    assert model.lm_head.weight is model.embed_tokens.weight
    assert error(ours(model), logits(theirs)) < TOLERANCE


def test_paths_may_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model("qwen3_moe").save_pretrained("in")
    Path("in/tokenizer.json").write_text("{}")
    model, config = model_from_hugging_face("in")
    load_hugging_face("in", model)
    assert read_config("in") == open_hugging_face("in")[1] == config
    copy_weights(open_hugging_face("in")[0], "ours.safetensors")
    for name, source in {"model": model, "file": open_safetensors("ours.safetensors")}.items():
        save_hugging_face(source, config, name, tokenizer="in")
        assert same_tensors(read_back(Path(name)), read_back(Path("in")))
    save_hugging_face(model, config, "lone", tokenizer="in/tokenizer.json")
    Path("carried").mkdir()
    assert copy_companions("in", "carried") == ["tokenizer.json", "generation_config.json"]
    with pytest.raises(ExchangeError, match=r"^Qwen/nowhere/config\.json: missing"):
        model_from_hugging_face("Qwen/nowhere")


def test_harmless_surplus_is_left_out(tmp_path: Path) -> None:
    make_model("deepseek_v2").save_pretrained(tmp_path / "in")
    file = tmp_path / "in/model.safetensors"
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
        "model.layers.1.mlp.none.weight": torch.ones(0, 24),
    }
    save_file({**load_file(file), **harmless}, file)
    model, _ = model_from_hugging_face(tmp_path / "in")
    assert model.norm.weight.isfinite().all()


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe"])
def test_experts_stacked_as_in_memory_are_read(family: str, tmp_path: Path) -> None:
    theirs = make_model(family)
    theirs.save_pretrained(tmp_path / "in")
    stacked = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert "model.layers.2.mlp.experts.gate_up_proj" in stacked
    save_file(stacked, tmp_path / "in/model.safetensors")
    model, _ = model_from_hugging_face(tmp_path / "in")
    assert error(ours(model), logits(theirs)) < TOLERANCE


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_no_shared_experts(tmp_path: Path) -> None:
    theirs = make_model("deepseek_v2", n_shared_experts=0)
    theirs.save_pretrained(tmp_path / "in")
    model, _ = model_from_hugging_face(tmp_path / "in")
    assert error(ours(model), logits(theirs)) < TOLERANCE


# --- MXFP4 ----------------------------------------------------------------------------------------


def quantized_folder(folder: Path) -> dict[str, Tensor]:
    """Make a GPT-OSS folder with packed experts; returns the dequantized tensors as `transformers`
    makes them, in its layout."""
    generator = torch.Generator().manual_seed(3)
    model = make_model("gpt_oss", hidden_size=64, intermediate_size=32).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors, unpacked = load_file(folder / "model.safetensors"), {}
    for name in [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(
            256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator
        )
        scales = torch.randint(118, 125, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}})
    )
    return unpacked


def test_packed_experts_are_those_that_transformers_unpacks(tmp_path: Path) -> None:
    expected = quantized_folder(tmp_path / "in")
    model, config = model_from_hugging_face(tmp_path / "in")
    assert len(expected) == 6
    for name, value in expected.items():
        actual = model.get_parameter(name.removeprefix("model."))
        assert actual.dtype == torch.bfloat16
        assert torch.equal(actual, value.transpose(1, 2))
    save_hugging_face(model, config, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    back = read_back(tmp_path / "out").state_dict()
    assert all(torch.equal(back[name], value) for name, value in expected.items())


# --- configuration and tokenizer ------------------------------------------------------------------


def test_tokenizer_and_generation_files_are_carried_along_and_code_is_not(tmp_path: Path) -> None:
    make_model("qwen3_moe", bos_token_id=3, eos_token_id=[4, 5], pad_token_id=6).save_pretrained(
        tmp_path / "in"
    )
    carried = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "merges.txt": "a b",
        "chat_template.jinja": "{{ x }}",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    }
    (tmp_path / "in/additional_chat_templates").mkdir()
    for name, text in {**carried, "modeling_x.py": "raise SystemExit", "README.md": "x"}.items():
        (tmp_path / "in" / name).write_text(text)
    model, config = model_from_hugging_face(tmp_path / "in")
    save_hugging_face(model, config, tmp_path / "out", tokenizer=tmp_path / "in")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    names = {path.relative_to(tmp_path / "out").as_posix() for path in files}
    assert names == {*carried, "config.json", "generation_config.json", "model.safetensors"}
    assert all((tmp_path / "out" / name).read_text() == text for name, text in carried.items())
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert [written[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [3, [4, 5], 6]


def test_a_tokenizer_of_a_run_is_loaded_by_transformers(tmp_path: Path) -> None:
    from lather.data.documents import train_tokenizer
    from lather.data.recipe import END_OF_TEXT

    tokenizer = train_tokenizer(iter(["def f(x):\n    return x + 1\n"] * 9), 300, END_OF_TEXT)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    make_model("deepseek_v2").save_pretrained(tmp_path / "in")
    model, config = model_from_hugging_face(tmp_path / "in")
    save_hugging_face(model, config, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    shutil.rmtree(tmp_path / "in")
    for loader in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        loaded = loader.from_pretrained(tmp_path / "out")
        text = "def g(é):\n\treturn  f(é) 🙂"
        assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert loaded.eos_token == END_OF_TEXT
        assert loaded.model_max_length == config.max_position_embeddings
    exported = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert exported.eos_token_id == tokenizer.token_to_id(END_OF_TEXT)
