"""Folders that cannot be read or written give one clear error each, and nothing changes;
`transformers` is not needed here."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lather.errors import ExchangeError
from lather.files import complete_folder
from lather.models.hf import model_folder, safetensors_folder
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import load_hugging_face, model_from_hugging_face
from lather.models.hf.safetensors_folder import open_safetensors, write_safetensors
from models.tiny import tiny_config, tiny_model

Damage = Callable[[Path], object]
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


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


def copy(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def edit_tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return edit


def edit_json(file: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return edit


def place(name: str, shard: object) -> Damage:
    return edit_json(INDEX, lambda index: index["weight_map"].update({name: shard}))


def cut(file: str, keep: int) -> Damage:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:keep])


class Trap:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def only_pickles(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(str(folder / "sprung"))))


SINGLE: dict[str, tuple[Damage, list[str]]] = {
    "no config": (
        lambda folder: (folder / CONFIG).unlink(),
        [CONFIG, "missing", "give the folder of a model"],
    ),
    "config is cut": (cut(CONFIG, 50), [CONFIG, "damaged", "give the folder of a model"]),
    "config is a list": (
        lambda folder: (folder / CONFIG).write_text("[]"),
        [CONFIG, "not a JSON object"],
    ),
    "another family": (
        edit_json(CONFIG, lambda c: c.update(model_type="mamba")),
        [CONFIG, "model_type", "'mamba'", "deepseek_v2"],
    ),
    "no family": (
        edit_json(CONFIG, lambda c: c.pop("model_type")),
        [CONFIG, "model_type", "deepseek_v2"],
    ),
    "unsupported field": (
        edit_json(CONFIG, lambda c: c.update(attention_bias=True)),
        [CONFIG, "attention_bias", "true", "false"],
    ),
    "unsupported quantization": (
        edit_json(CONFIG, lambda c: c.update(quantization_config={"quant_method": "fp8"})),
        [CONFIG, "quantization_config", "'fp8'"],
    ),
    "field of a wrong type": (
        edit_json(CONFIG, lambda c: c.update(hidden_size="24")),
        [CONFIG, "hidden_size", "'24'", "an integer"],
    ),
    "a size beyond all models": (
        edit_json(CONFIG, lambda c: c.update(hidden_size=10**30)),
        [CONFIG, "hidden_size", "below 1e+08"],
    ),
    "a number beyond float": (
        edit_json(CONFIG, lambda c: c.update(rope_theta=10**400)),
        [CONFIG, "rope_theta", "below 1e+300"],
    ),
    "endless config": (
        lambda folder: (folder / CONFIG).write_text("[" * 100_000),
        [CONFIG, "damaged"],
    ),
    "wrong shape": (
        edit_tensors(lambda t: t.update({EXPERT: torch.zeros(11, 23)})),
        [WEIGHTS, EXPERT, "(11, 23)", "(11, 24)", "give the configuration"],
    ),
    "as many values in another shape": (
        edit_tensors(lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()})),
        [EXPERT, "(24, 11)", "(11, 24)"],
    ),
    "wrong size in the configuration": (
        edit_json(CONFIG, lambda c: c.update(vocab_size=38)),
        ["embed_tokens", "(37, 24)", "(38, 24)"],
    ),
    "one missing": (
        edit_tensors(lambda t: t.pop(EXPERT)),
        ["lacks", repr(EXPERT), "give the weights"],
    ),
    "several missing": (
        edit_json(CONFIG, lambda c: c.update(num_hidden_layers=4)),
        ["lacks 'model.layers.3.input_layernorm.weight' and 25 more"],
    ),
    "one left over": (
        edit_tensors(lambda t: t.update({"model.layers.1.mlp.gate.bias": torch.zeros(5)})),
        [WEIGHTS, "surplus 'model.layers.1.mlp.gate.bias'", "give the configuration"],
    ),
    "several left over": (
        edit_json(CONFIG, lambda c: c.update(num_hidden_layers=2)),
        ["surplus 'model.layers.2", "and 25 more"],
    ),
    "integers": (
        edit_tensors(lambda t: t.update({EXPERT: torch.zeros(11, 24, dtype=torch.int8)})),
        [WEIGHTS, EXPERT, "I8", "BF16"],
    ),
    "fp8": (
        edit_tensors(lambda t: t.update({EXPERT: torch.zeros(11, 24).to(torch.float8_e4m3fn)})),
        [WEIGHTS, EXPERT, "F8_E4M3", "BF16"],
    ),
    "no bytes": (cut(WEIGHTS, 0), [WEIGHTS, "truncated", "again"]),
    "header is cut": (cut(WEIGHTS, 100), [WEIGHTS, "truncated", "again"]),
    "last byte is gone": (cut(WEIGHTS, -1), [WEIGHTS, "truncated", "again"]),
    "header is not JSON": (
        lambda folder: (folder / WEIGHTS).write_bytes(
            (8).to_bytes(8, "little") + b"{{{{{{{{" + bytes(64)
        ),
        [WEIGHTS, "damaged", "again"],
    ),
    "header is longer than memory": (
        lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 64),
        [WEIGHTS, "damaged", "again"],
    ),
    "weights are a folder": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()),
        [WEIGHTS, "again"],
    ),
    "no weights": (
        lambda folder: (folder / WEIGHTS).unlink(),
        ["neither model.safetensors nor", "give a folder with weights"],
    ),
    "only pickles": (
        only_pickles,
        ["pytorch_model.bin", "refused", "run any code", "save_pretrained"],
    ),
}
SHARDED: dict[str, tuple[Damage, list[str]]] = {
    "absent shard": (
        lambda folder: next(folder.glob("model-00002*")).unlink(),
        [INDEX, "model-00002-of-", "missing", "again"],
    ),
    "cut shard": (
        lambda folder: cut(next(folder.glob("model-00002*")).name, -9)(folder),
        ["model-00002-of-", "truncated", "again"],
    ),
    "tensor in another shard": (
        lambda folder: place("model.norm.weight", next(folder.glob("model-00002*")).name)(folder),
        [INDEX, "'model.norm.weight'", "model-00002-of-", "does not hold it", "again"],
    ),
    "path out of the folder": (
        place("model.norm.weight", "../secret.safetensors"),
        [INDEX, "'../secret.safetensors'", "beside it"],
    ),
    "absolute path": (
        place("model.norm.weight", "/etc/x.safetensors"),
        [INDEX, "'/etc/x.safetensors'", "beside it"],
    ),
    "pickled shard": (
        place("model.norm.weight", "pytorch_model.bin"),
        [INDEX, "'pytorch_model.bin'", "beside it"],
    ),
    "no name": (place("model.norm.weight", None), [INDEX, "not a usable index", "again"]),
    "no map": (
        edit_json(INDEX, lambda index: index.pop("weight_map")),
        [INDEX, "not a usable index", "weight_map"],
    ),
    "index is a list": (
        lambda folder: (folder / INDEX).write_text("[]"),
        [INDEX, "not a usable index"],
    ),
    "cut index": (cut(INDEX, 99), [INDEX, "not a usable index", "again"]),
    "one not listed": (
        edit_json(INDEX, lambda index: index["weight_map"].pop(EXPERT)),
        ["holds", repr(EXPERT), "does not place there", "again"],
    ),
    "endless index": (
        lambda folder: (folder / INDEX).write_text("[" * 100_000),
        [INDEX, "not a usable index"],
    ),
}
CASES = {f"single: {name}": ("single", *case) for name, case in SINGLE.items()}
CASES |= {f"sharded: {name}": ("sharded", *case) for name, case in SHARDED.items()}


@pytest.mark.parametrize(("source", "damage", "expected"), CASES.values(), ids=CASES)
def test_a_bad_folder_is_one_clear_error_and_the_model_is_as_before(
    source: str, damage: Damage, expected: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = copy(request.getfixturevalue(source), tmp_path / "in")
    (tmp_path / "secret.safetensors").write_bytes(
        (folder / WEIGHTS).read_bytes() if source == "single" else b""
    )
    damage(folder)
    model, before = tiny_model(seed=1), tiny_model(seed=1)
    for attempt in (
        lambda: load_hugging_face(folder, model),
        lambda: model_from_hugging_face(folder),
    ):
        with pytest.raises(ExchangeError) as raised:
            attempt()
        message = str(raised.value)
        assert message.startswith(str(folder))
        assert "\n" not in message
        for words in expected:
            assert words in message
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True)
    )
    assert not (folder / "sprung").exists()


def test_the_folders_are_good_when_nothing_is_damaged(single: Path, sharded: Path) -> None:
    for folder in (single, sharded):
        model = tiny_model(seed=1)
        load_hugging_face(folder, model)
        assert all(
            torch.equal(p, q)
            for p, q in zip(model.parameters(), tiny_model().parameters(), strict=True)
        )


def test_rows_that_mxfp4_cannot_hold(tmp_path: Path) -> None:
    from lather.models.families.gpt_oss import GptOssConfig

    sizes = {
        "vocab_size": 9,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_local_experts": 2,
    }
    config = GptOssConfig(
        **sizes, num_experts_per_tok=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4
    )
    model = model_folder.build_model(config, torch.Generator())
    save_hugging_face(model, config, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / WEIGHTS)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    del tensors[name]
    tensors |= {
        f"{name}_blocks": torch.zeros(2, 64, 1, 16).byte(),
        f"{name}_scales": torch.zeros(2, 64, 1).byte(),
    }
    save_file(tensors, tmp_path / "in" / WEIGHTS)
    with pytest.raises(ExchangeError, match=f"{name} has rows of 24, not whole MXFP4 blocks"):
        model_from_hugging_face(tmp_path / "in")


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
    "not a number": (
        lambda e: e.clone().index_fill_(0, torch.tensor(3), torch.nan),
        ["differs from"],
    ),
    "rounded": (lambda e: e.bfloat16(), ["differs from"]),
    "fewer rows": (lambda e: e[:-1].clone(), ["(36, 24)", "(37, 24)"]),
    "transposed": (lambda e: e.T.contiguous(), ["(24, 37)", "(37, 24)"]),
    "integers": (lambda e: e.to(torch.int8), ["I8", "BF16"]),
}


@pytest.mark.parametrize("elements", [2**20, 100, 1], ids=str)
@pytest.mark.parametrize(("make_head", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_head_that_is_not_the_embedding_it_is_tied_to(
    make_head: Callable[[Tensor], Tensor],
    expected: list[str],
    elements: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result does not depend on how many elements are compared at a time."""
    monkeypatch.setattr(model_folder, "COMPARED_ELEMENTS", elements)
    save_hugging_face(
        tiny_model(tie_word_embeddings=True), tiny_config(tie_word_embeddings=True), tmp_path / "in"
    )
    file = tmp_path / "in" / WEIGHTS
    tensors = load_file(file)
    save_file({**tensors, HEAD: make_head(tensors[EMBEDDING])}, file)
    model, before = (tiny_model(seed=1, tie_word_embeddings=True) for _ in range(2))
    for attempt in (
        lambda: load_hugging_face(tmp_path / "in", model),
        lambda: model_from_hugging_face(tmp_path / "in"),
    ):
        with pytest.raises(ExchangeError) as raised:
            attempt()
        for words in [str(file), repr(HEAD), *expected]:
            assert words in str(raised.value)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True)
    )


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


# --- writing --------------------------------------------------------------------------------------


def test_a_target_that_holds_something_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, words in {
        "out": "is not an empty folder",
        "file": "is not an empty folder",
        "file/below": "cannot be written",
    }.items():
        with pytest.raises(ExchangeError, match=f"{name}: .*{words}.*give another place"):
            save_hugging_face(tiny_model(), tiny_config(), tmp_path / name)
    assert (tmp_path / "out/mine").read_text() == (tmp_path / "file").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_an_empty_folder_and_one_below_folders_that_are_not_there_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty2")
    (tmp_path / "empty2").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for target in (tmp_path / "empty", tmp_path / "a/b/c", tmp_path / "link", Path()):
        save_hugging_face(tiny_model(), tiny_config(), target)
    for name in ("empty", "a/b/c", "empty2", "here"):
        assert {path.name for path in (tmp_path / name).iterdir()} == {CONFIG, WEIGHTS}
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize("size", [0, -1])
def test_a_shard_size_below_one_byte(size: int, tmp_path: Path) -> None:
    with pytest.raises(
        ExchangeError, match=f"max_shard_bytes = {size} is not valid: give at least 1"
    ):
        save_hugging_face(tiny_model(), tiny_config(), tmp_path / "out", max_shard_bytes=size)


def test_weights_of_another_configuration_are_not_written(tmp_path: Path) -> None:
    for config in (
        tiny_config(vocab_size=38),
        tiny_config(num_hidden_layers=4),
        tiny_config(tie_word_embeddings=True),
    ):
        with pytest.raises(ExchangeError, match="does not match the configuration"):
            save_hugging_face(tiny_model(), config, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_balancing_bias_is_not_left_out_silently(tmp_path: Path) -> None:
    model = tiny_model()
    for router in model.routers():
        router.enable_loss_free_balancing()
    with pytest.raises(
        ExchangeError,
        match=(
            r"'layers\.1\.mlp\.gate\.e_score_correction_bias' and 1 more "
            r".* cannot be exported.*bias_update_rate = 0"
        ),
    ):
        save_hugging_face(model, tiny_config(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_exception_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def fail_at_the_third(*arguments: Any) -> None:
        if len(written) == 2:
            raise RuntimeError("power cut")
        write_safetensors(*arguments)
        written.append(arguments[0])
        assert arguments[0].exists()
        assert not (tmp_path / "out").exists()

    monkeypatch.setattr(safetensors_folder, "write_safetensors", fail_at_the_third)
    with pytest.raises(RuntimeError, match="power cut"):
        save_hugging_face(tiny_model(), tiny_config(), tmp_path / "out", max_shard_bytes=30_000)
    assert len(written) == 2
    assert not list(tmp_path.iterdir())


KILLED_HALF_WAY = """
import os, signal, sys
from pathlib import Path
from lather.models.hf import model_export, safetensors_folder
from models.tiny import tiny_config, tiny_model
write = safetensors_folder.write_safetensors
def kill_at_the_second(file, *rest):
    if "00002" in file.name:
        file.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, *rest)
safetensors_folder.write_safetensors = kill_at_the_second
folder = Path(sys.argv[1])
model_export.save_hugging_face(tiny_model(), tiny_config(), folder, max_shard_bytes=30_000)
"""


def test_a_kill_half_way_leaves_no_folder_and_the_next_attempt_clears_up(
    tmp_path: Path, sharded: Path
) -> None:
    target = tmp_path / "out"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]),
    }
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_HALF_WAY, str(target)],
        env=environment,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    assert len(list((tmp_path / ".tmp-out").iterdir())) == 2
    (tmp_path / ".tmp-out/of an earlier one").mkdir()
    (tmp_path / ".tmp-out/of an earlier one/x").write_text("x")
    save_hugging_face(tiny_model(), tiny_config(), target, max_shard_bytes=30_000)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == {
        p.name: p.read_bytes() for p in sharded.iterdir()
    }
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_writers_of_one_folder_do_not_meet(tmp_path: Path) -> None:
    with complete_folder(tmp_path / "out") as aside:
        (aside / "first").write_text("x")
        with pytest.raises(ExchangeError, match="out: another process is writing it"):
            save_hugging_face(tiny_model(), tiny_config(), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["first"]


# --- the files ------------------------------------------------------------------------------------


def test_written_files_are_what_the_library_reads(tmp_path: Path) -> None:
    """Tensors have mixed dtypes, odd sizes, no elements or no dims: values, metadata and alignment
    must be right."""
    from safetensors import safe_open

    from lather.models.hf.safetensors_folder import TensorToWrite

    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (63,), "b": (3, 0), "c": (), "d": (1,), "e": (5, 7, 2)}
    dtypes = dict(
        zip(
            shapes,
            (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32),
            strict=True,
        )
    )
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtypes[name])
        for name, shape in shapes.items()
    }
    pieces = {
        name: tensor.unbind() if name == "e" else [tensor] for name, tensor in tensors.items()
    }
    write_safetensors(
        tmp_path / "x",
        [TensorToWrite(name, dtypes[name], shape, pieces[name]) for name, shape in shapes.items()],
    )
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    assert all(
        found[name].dtype == dtypes[name] and torch.equal(found[name], tensors[name])
        for name in tensors
    )
    with safe_open(tmp_path / "x", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    content = (tmp_path / "x").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % dtypes[name].itemsize == 0 for name in tensors)


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
    assert all(
        torch.equal(p, q)
        for p, q in zip(another.parameters(), tiny_model(vocab_size=38).parameters(), strict=True)
    )
    with pytest.raises(ExchangeError, match="does not match the configuration"):
        save_hugging_face(LeftOut(), tiny_config(), tmp_path / "out")
