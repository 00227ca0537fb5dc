"""Folders that cannot be read or written give one clear error each, and nothing changes;
`transformers` is not needed here."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lather.errors import ExchangeError
from lather.models.hf import published_weights
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import load_hugging_face, model_from_hugging_face
from lather.safetensors_file import open_safetensors, write_safetensors
from models.tiny import tiny_config, tiny_family_config, tiny_family_model, tiny_model

Damage = Callable[[Path], object]
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
EXPERT, NORM = "model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    save_hugging_face(tiny_model(), tiny_config(), folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_hugging_face(tiny_model(), tiny_config(), folder, max_shard_bytes=30_000)
    return folder


def edit_tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return edit


def put(expert: Callable[[Tensor], Tensor]) -> Damage:
    """Put another tensor in the place of an expert's."""
    return edit_tensors(lambda tensors: tensors.update({EXPERT: expert(tensors[EXPERT])}))


def edit_json(file: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return edit


def config(**changes: Any) -> Damage:
    return edit_json(CONFIG, lambda fields: fields.update(changes))


def place(shard: object) -> Damage:
    """Let the index place a tensor in another shard."""
    return edit_json(INDEX, lambda index: index["weight_map"].update({NORM: shard}))


def write(file: str, content: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content)


def cut(file: str, length: int) -> Damage:
    return lambda folder: write(file, (folder / file).read_bytes()[:length])(folder)


def remove(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


class Trap:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def only_pickles(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(str(folder / "sprung"))))


BEGIN, SHARD = "give the folder of a model", "model-00002-of-00004.safetensors"
SINGLE: dict[str, tuple[Damage, list[str]]] = {
    "no config": (remove(CONFIG), [CONFIG, "missing", BEGIN]),
    "config is cut": (cut(CONFIG, 50), [CONFIG, "damaged", BEGIN]),
    "config is a list": (write(CONFIG, b"[]"), [CONFIG, "not a JSON object"]),
    "endless config": (write(CONFIG, b"[" * 100_000), [CONFIG, "damaged"]),
    "another family": (config(model_type="mamba"), [CONFIG, "model_type", "'mamba'", "gpt_oss"]),
    "a bad field": (config(attention_bias=True), [CONFIG, "attention_bias", "true", "false"]),
    "a number beyond float": (config(rope_theta=10**400), [CONFIG, "rope_theta", "below 1e+300"]),
    "wrong shape": (put(lambda x: x[:, 1:].clone()), [WEIGHTS, EXPERT, "(11, 23)", "(11, 24)"]),
    "transposed": (put(lambda x: x.T.contiguous()), [EXPERT, "(24, 11)", "give the configuration"]),
    "integers": (put(lambda x: x.to(torch.int8)), [WEIGHTS, EXPERT, "I8", "BF16"]),
    "fp8": (put(lambda x: x.to(torch.float8_e4m3fn)), [WEIGHTS, EXPERT, "F8_E4M3", "BF16"]),
    "another size": (config(vocab_size=38), ["embed_tokens", "(37, 24)", "(38, 24)"]),
    "one missing": (edit_tensors(lambda t: t.pop(EXPERT)), ["lacks", repr(EXPERT), "give the"]),
    "several missing": (
        config(num_hidden_layers=4),
        ["lacks 'model.layers.3.input_layernorm.weight' and 25 more"],
    ),
    "one left over": (
        edit_tensors(lambda t: t.update({"model.layers.1.mlp.gate.bias": torch.zeros(5)})),
        [WEIGHTS, "surplus 'model.layers.1.mlp.gate.bias'", "give the configuration"],
    ),
    "several left over": (config(num_hidden_layers=2), ["surplus 'model.layers.2", "and 25 more"]),
    "no bytes": (cut(WEIGHTS, 0), [WEIGHTS, "truncated", "again"]),
    "header is cut": (cut(WEIGHTS, 100), [WEIGHTS, "truncated", "again"]),
    "last byte is gone": (cut(WEIGHTS, -1), [WEIGHTS, "truncated", "again"]),
    "header is not JSON": (
        write(WEIGHTS, (8).to_bytes(8, "little") + b"{{{{{{{{" + bytes(64)),
        [WEIGHTS, "damaged", "again"],
    ),
    "header beyond memory": (write(WEIGHTS, b"\xff" * 64), [WEIGHTS, "damaged", "again"]),
    "weights are a folder": (
        lambda folder: (remove(WEIGHTS)(folder), (folder / WEIGHTS).mkdir()),
        [WEIGHTS, "again"],
    ),
    "no weights": (remove(WEIGHTS), [f"neither {WEIGHTS} nor", "give a folder with weights"]),
    "only pickles": (only_pickles, ["pytorch_model.bin", "refused", "run any", "save_pretrained"]),
}
SHARDED: dict[str, tuple[Damage, list[str]]] = {
    "absent shard": (remove(SHARD), [INDEX, SHARD, "missing", "again"]),
    "cut shard": (cut(SHARD, -9), [SHARD, "truncated", "again"]),
    "tensor in another shard": (place(SHARD), [INDEX, repr(NORM), SHARD, "does not hold it"]),
    "path out of the folder": (place("../secret.safetensors"), [INDEX, "'../secret", "beside it"]),
    "absolute path": (place("/etc/x.safetensors"), [INDEX, "'/etc/x.safetensors'", "beside it"]),
    "pickled shard": (place("pytorch_model.bin"), [INDEX, "'pytorch_model.bin'", "beside it"]),
    "no name": (place(None), [INDEX, "not a usable index", "again"]),
    "no map": (
        edit_json(INDEX, lambda index: index.pop("weight_map")),
        [INDEX, "not a usable index", "weight_map"],
    ),
    "index is a list": (write(INDEX, b"[]"), [INDEX, "not a usable index"]),
    "endless index": (write(INDEX, b"[" * 100_000), [INDEX, "not a usable index"]),
    "cut index": (cut(INDEX, 99), [INDEX, "not a usable index", "again"]),
    "one not listed": (
        edit_json(INDEX, lambda index: index["weight_map"].pop(EXPERT)),
        ["holds", repr(EXPERT), "does not place there", "again"],
    ),
}


def same_weights(model: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def assert_refused(folder: Path, words: list[str], **changes: Any) -> None:
    """Check that both ways to read the folder raise one clear error, and change no model."""
    model, before = (tiny_model(seed=1, **changes) for _ in range(2))
    for attempt in (
        lambda: load_hugging_face(folder, model),
        lambda: model_from_hugging_face(folder),
    ):
        with pytest.raises(ExchangeError) as raised:
            attempt()
        message = str(raised.value)
        assert message.startswith(str(folder))
        assert "\n" not in message
        for each in words:
            assert each in message
    assert same_weights(model, before)


@pytest.mark.parametrize(("damage", "words"), SINGLE.values(), ids=SINGLE)
def test_a_bad_folder_is_one_clear_error_and_the_model_is_as_before(
    damage: Damage, words: list[str], tmp_path: Path, single: Path
) -> None:
    folder = shutil.copytree(single, tmp_path / "in")
    damage(folder)
    assert_refused(folder, words)
    assert not (folder / "sprung").exists()


@pytest.mark.parametrize(("damage", "words"), SHARDED.values(), ids=SHARDED)
def test_bad_shards_are_one_clear_error(
    damage: Damage, words: list[str], tmp_path: Path, sharded: Path
) -> None:
    folder = shutil.copytree(sharded, tmp_path / "in")
    (tmp_path / "secret.safetensors").touch()
    damage(folder)
    assert_refused(folder, words)


def test_the_folders_are_good_when_nothing_is_damaged(single: Path, sharded: Path) -> None:
    for folder in (single, sharded):
        model = tiny_model(seed=1)
        load_hugging_face(folder, model)
        assert same_weights(model, tiny_model())
    assert (sharded / SHARD).exists()


def test_rows_that_mxfp4_cannot_hold(tmp_path: Path) -> None:
    config, name = tiny_family_config("gpt_oss"), "model.layers.0.mlp.experts.gate_up_proj"
    save_hugging_face(tiny_family_model("gpt_oss"), config, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    del tensors[name]
    tensors[f"{name}_blocks"] = torch.zeros(5, 22, 1, 16).byte()
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ExchangeError, match=f"{name} has rows of 24, not whole MXFP4 blocks"):
        model_from_hugging_face(tmp_path)


# --- tied weights ---------------------------------------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def change_one(row: int, column: int) -> Callable[[Tensor], Tensor]:
    def change(embedding: Tensor) -> Tensor:
        head = embedding.clone()
        head[row, column] *= 1.01
        return head

    return change


DIFFERENT: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "first element": (change_one(0, 0), ["differs from", EMBEDDING, "tie_word_embeddings"]),
    "last element": (change_one(36, 23), ["differs from", EMBEDDING, "tie_word_embeddings"]),
    "not a number": (lambda e: e.masked_fill(e == e[3], torch.nan), ["differs from"]),
    "rounded": (lambda e: e.bfloat16(), ["differs from"]),
    "fewer rows": (lambda e: e[:-1].clone(), ["(36, 24)", "(37, 24)"]),
    "integers": (lambda e: e.to(torch.int8), ["I8", "BF16"]),
}


@pytest.mark.parametrize("elements", [2**20, 100], ids=str)
@pytest.mark.parametrize(("make_head", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_head_that_is_not_the_embedding_it_is_tied_to(
    make_head: Callable[[Tensor], Tensor],
    words: list[str],
    elements: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result does not depend on how many elements are compared at a time."""
    monkeypatch.setattr(published_weights, "COMPARED_ELEMENTS", elements)
    tied = {"tie_word_embeddings": True}
    save_hugging_face(tiny_model(**tied), tiny_config(**tied), tmp_path / "in")
    file = tmp_path / "in" / WEIGHTS
    tensors = load_file(file)
    save_file({**tensors, HEAD: make_head(tensors[EMBEDDING])}, file)
    assert_refused(tmp_path / "in", [str(file), repr(HEAD), *words], **tied)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_head_that_is_the_embedding_in_the_same_or_another_dtype(
    stored: torch.dtype, tmp_path: Path
) -> None:
    """A value that is not a number makes no difference, either."""
    config = tiny_config(tie_word_embeddings=True)
    save_hugging_face(
        tiny_model(tie_word_embeddings=True), config, tmp_path / "in", dtype=torch.bfloat16
    )
    tensors = load_file(tmp_path / "in" / WEIGHTS)
    tensors[EMBEDDING][3, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    save_file(
        {**tensors, HEAD: tensors[EMBEDDING].to(stored, copy=True)}, tmp_path / "in" / WEIGHTS
    )
    model, _ = model_from_hugging_face(tmp_path / "in")
    assert torch.equal(model.lm_head.weight.nan_to_num(7), tensors[EMBEDDING].nan_to_num(7))


# --- the files ------------------------------------------------------------------------------------


def test_written_files_are_what_the_library_reads(tmp_path: Path) -> None:
    """Tensors have mixed dtypes, odd sizes, no elements or no dims: values, metadata and alignment
    must be right."""
    from safetensors import safe_open

    from lather.safetensors_file import TensorToWrite

    generator = torch.Generator().manual_seed(0)
    shapes: dict[torch.dtype, tuple[int, ...]] = {torch.bfloat16: (63,), torch.float16: ()}
    shapes |= {torch.float64: (3, 0), torch.float32: (5, 7, 2)}
    tensors = {
        str(dtype): torch.randn(shape, generator=generator).to(dtype)
        for dtype, shape in shapes.items()
    }
    to_write = [
        TensorToWrite(name, x.dtype, tuple(x.shape), x.unbind() if x.dim() == 3 else [x])
        for name, x in tensors.items()
    ]
    write_safetensors(tmp_path / "x", to_write)
    written = load_file(tmp_path / "x")
    assert written.keys() == tensors.keys()
    for name, x in tensors.items():
        assert written[name].dtype == x.dtype
        assert torch.equal(written[name], x)
    with safe_open(tmp_path / "x", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    content = (tmp_path / "x").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % x.itemsize == 0 for name, x in tensors.items())


def test_a_part_of_a_tensor_is_read(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(60.0).view(5, 4, 3).bfloat16(), "y": torch.ones(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    stored = open_safetensors(tmp_path / "x.safetensors")
    assert torch.equal(stored.read("x"), tensors["x"])
    for index in ((2,), (4, slice(1, 3)), (slice(0, 2),), (0, 3)):
        assert torch.equal(stored.read("x", index), tensors["x"][index])


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    save_file({"x": torch.ones(60)}, tmp_path / "x.safetensors")
    stored = open_safetensors(tmp_path / "x.safetensors")
    cut("x.safetensors", -1)(tmp_path)
    with pytest.raises(ExchangeError, match=r"x\.safetensors: was truncated while it was read"):
        stored.read("x")
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(
        ExchangeError, match=r"x\.safetensors: has become unreadable \(No such file"
    ):
        stored.read("x")


class LeftOut(nn.Module):
    """Parameters that no family has."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))


def test_a_model_of_something_else_is_neither_filled_nor_written(
    single: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ExchangeError,
        match=r"holds another model: embed_tokens.weight is \(37, 24\) there and absent here",
    ):
        load_hugging_face(single, LeftOut())
    another = tiny_model(vocab_size=38)
    with pytest.raises(
        ExchangeError,
        match=r"embed_tokens.weight is \(37, 24\) there and \(38, 24\) here: build the model",
    ):
        load_hugging_face(single, another)
    assert same_weights(another, tiny_model(vocab_size=38))
    with pytest.raises(ExchangeError, match="does not match the configuration"):
        save_hugging_face(LeftOut(), tiny_config(), tmp_path / "out")
