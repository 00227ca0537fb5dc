"""`lather import` and `lather export` as a user meets them."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lather.checkpoint.reader import load_checkpoint
from lather.checkpoint.state import TrainingState
from lather.cli import main
from lather.commands.parsing import parse_size
from lather.config.optim import optim_config
from lather.config.rule_names import DEFAULT_RULE
from lather.config.toml_file import load_config
from lather.data.documents import train_tokenizer
from lather.data.recipe import END_OF_TEXT
from lather.engine.engine import build_model
from lather.errors import ConfigError
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import model_from_hugging_face
from models.tiny import error, tiny_config, tiny_model
from tiny_run import timeless_rows, write_config

Lather = Callable[..., str]
FIRST = "checkpoints/step-00000000"
FILE = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("published")
    save_hugging_face(tiny_model(vocab_size=300), tiny_config(vocab_size=300), folder)
    train_tokenizer(iter(["def f(x): return x\n"] * 9), 300, END_OF_TEXT).save(
        str(folder / "tokenizer.json")
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    return folder


@pytest.fixture(scope="module")
def imported(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("imported") / "run"
    assert main(["import", str(published), str(run)]) == 0
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, a checkpoint at each."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder, steps=3, checkpoint_every=1)
    command = ["train", config, "--run-dir", folder / "run", "--checkpoint.keep-last", 9]
    assert main([*map(str, command)]) == 0
    return folder / "run"


@pytest.fixture
def copied(published: Path, tmp_path: Path) -> Path:
    """A copy of the folder, alone in a folder."""
    shutil.copytree(published, tmp_path / "in")
    return tmp_path / "in"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- what they do ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe", "gpt_oss"])
def test_a_model_of_transformers_comes_back_to_the_bit(
    family: str, tmp_path: Path, lather: Lather
) -> None:
    pytest.importorskip("transformers")
    from models.published import logits, make_model, read_back

    theirs, run, out = make_model(family), tmp_path / "run", tmp_path / "out"
    theirs.save_pretrained(tmp_path / "in", max_shard_size=30_000)
    printed = lather("import", tmp_path / "in", run)
    assert f"{family}, 0.0" in printed
    assert f"--init-from {run}" in printed
    printed = lather("export", run, out, "--dtype", "fp32", "--max-shard-size", "20KB")
    assert "step-00000000 in fp32" in printed
    assert len(list(out.glob("*.safetensors"))) > 3
    assert torch.equal(logits(read_back(out)), logits(theirs))
    assert load_config(run / "config.toml").model == model_from_hugging_face(out)[1]


def test_an_imported_run_is_not_trained_in_place_on_text_that_nobody_named(
    imported: Path, lather: Lather
) -> None:
    before = contents(imported)
    for name in (imported, imported / "config.toml"):
        error = lather("train", name, "--train.steps", 3, status=2)
        assert "its configuration names no data: give --data.path or --data.source" in error
    assert contents(imported) == before


def test_an_imported_run_has_all_that_a_run_has_and_generates(
    published: Path, imported: Path, lather: Lather
) -> None:
    companions = ("config.json", "generation_config.json", "tokenizer.json")
    assert set(contents(imported)) == {
        *("config.toml", "tokenizer.json", f"{FIRST}/{FILE}", f"{FIRST}/state.json"),
        *(f"huggingface/{name}" for name in companions),
    }
    assert (imported / "tokenizer.json").read_bytes() == (published / "tokenizer.json").read_bytes()
    assert load_config(imported / "config.toml").run_dir == str(imported)
    weights = load_file(imported / FIRST / FILE)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    printed = lather("generate", imported, "--prompt", "def f", "--tokens", 3)
    assert printed.startswith("def f")


def test_exporting_an_imported_run_gives_the_folder_again(
    published: Path, imported: Path, tmp_path: Path, lather: Lather
) -> None:
    lather("export", imported, tmp_path / "out", "--dtype", "fp32")
    assert contents(published) == contents(tmp_path / "out")


def test_a_trained_run_is_exported_in_bf16_with_its_tokenizer(
    trained: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer_text = "def f7(x):\n    return x"
    for dtype, arguments in {
        torch.bfloat16: [],
        torch.float32: ["--dtype", "fp32"],
        torch.float16: ["--dtype", "fp16"],
    }.items():
        out = tmp_path / str(dtype)
        assert main(["export", str(trained), str(out), *arguments]) == 0
        stored = load_file(out / "model.safetensors")
        weights = load_file(trained / "checkpoints/step-00000003" / FILE)
        assert {tensor.dtype for tensor in stored.values()} == {dtype}
        assert torch.equal(stored["model.norm.weight"], weights["norm.weight"].to(dtype))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer(tokenizer_text)["input_ids"]) == tokenizer_text
    tokens = torch.tensor([tokenizer(tokenizer_text)["input_ids"]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "torch.float32", attn_implementation="eager", experts_implementation="eager"
    )
    ours = build_model(load_config(trained / "config.toml"), torch.device("cpu"))
    load_checkpoint(trained / "checkpoints/step-00000003", TrainingState.of_model(ours))
    with torch.no_grad():
        assert error(theirs(tokens).logits, ours(tokens).logits_BSV) < 1e-5


def test_a_run_with_bf16_weights_is_exported_forked_and_generates(
    trained: Path, tmp_path: Path, lather: Lather
) -> None:
    """The exported fp32 weights have the bits of the bf16 weights, plus those of remainders."""
    run, out, fork, imported = (tmp_path / name for name in ("run", "out", "fork", "imported"))
    narrow = ("--train.precision", "bf16", "--train.weight-dtype", "bfloat16")
    config, name = trained.parent / "tiny.toml", "layers.0.self_attn.o_proj.weight"
    lather("train", config, "--run-dir", run, "--checkpoint.keep-last", 9, *narrow)
    lather("export", run, out, "--dtype", "fp32")
    exported = load_file(out / "model.safetensors")[f"model.{name}"]
    kept = load_file(run / "checkpoints/step-00000003" / FILE)
    upper = kept[name].view(torch.int16).to(torch.int32) << 16
    remainder = kept[f"{name}/remainder"].view(torch.int16).squeeze(-1)
    assert torch.equal(exported.view(torch.int32), upper + remainder)
    assert remainder.count_nonzero() > 0.9 * remainder.numel()
    lather("train", config, "--run-dir", fork, "--fork-from", f"{run}@2", *narrow)
    assert timeless_rows(fork)[-1] == timeless_rows(run)[-1]
    lather("import", out, imported)
    prompt = ("--prompt", "def f", "--tokens", 8, "--temperature", 0)
    assert lather("generate", run, *prompt) == lather("generate", imported, *prompt)


def test_an_export_says_so_where_transformers_computes_something_else(
    trained: Path, tmp_path: Path, lather: Lather, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "note:" not in lather("export", trained, tmp_path / "plain")
    monkeypatch.setattr(DeepseekV2Config, "normalizes", property(lambda self: True))
    printed = lather("export", trained, tmp_path / "normalized")
    assert "note: transformers ignores norm_topk_prob" in printed


def test_step_chooses_the_checkpoint(trained: Path, tmp_path: Path, lather: Lather) -> None:
    exported = {}
    for step in (1, 3, -1):
        lather("export", trained, tmp_path / str(step), "--step", step, "--dtype", "fp32")
        tensors = load_file(tmp_path / str(step) / "model.safetensors")
        exported[step] = tensors["model.embed_tokens.weight"]
    weights = load_file(trained / "checkpoints/step-00000001" / FILE)["embed_tokens.weight"]
    assert torch.equal(exported[1], weights)
    assert not torch.equal(exported[1], exported[3])
    assert torch.equal(exported[-1], exported[3])


def test_a_run_trained_with_another_tokenizer_is_exported_with_that_one(
    imported: Path, trained: Path, tmp_path: Path, lather: Lather
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(imported, run)
    shutil.copyfile(trained / "tokenizer.json", run / "tokenizer.json")
    lather("export", run, out)
    assert (out / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>"


def test_a_run_trained_with_the_imported_tokenizer_is_exported_with_all_that_was_imported(
    imported: Path, trained: Path, tmp_path: Path, lather: Lather
) -> None:
    """Training has written the tokenizer again, into another run."""
    run, tokenizer = tmp_path / "run", json.loads((imported / "tokenizer.json").read_text())
    shutil.copytree(trained, run)
    (run / "tokenizer.json").write_text(json.dumps(tokenizer, indent=7))
    text, before = (run / "config.toml").read_text(), 'tokenizer = ""'
    assert before in text
    text = text.replace(before, f'tokenizer = "{imported / "tokenizer.json"}"')
    (run / "config.toml").write_text(text)
    lather("export", run, tmp_path / "out")
    name = "generation_config.json"
    assert (tmp_path / "out" / name).read_bytes() == (imported / "huggingface" / name).read_bytes()


@pytest.mark.parametrize(
    ("eos", "expected"),
    [(7, "'"), ([8, 7], "("), *((eos, END_OF_TEXT) for eos in (None, 999, 2**40))],
    ids=str,
)
def test_further_training_uses_the_tokenizer_and_the_end_of_documents_of_the_model(
    eos: object, expected: str, copied: Path, tmp_path: Path, lather: Lather
) -> None:
    train_tokenizer(iter(["x"]), 300, "<end>").save(str(copied / "tokenizer.json"))
    change(copied / "config.json", eos_token_id=eos)
    lather("import", copied, tmp_path / "run")
    data = load_config(tmp_path / "run/config.toml").data
    assert data.tokenizer == str(tmp_path.resolve() / "run/tokenizer.json")
    assert data.end_of_text == expected


def change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_folder_without_tokenizer_is_imported_with_a_note(
    copied: Path, tmp_path: Path, lather: Lather
) -> None:
    (copied / "tokenizer.json").unlink()
    out = lather("import", copied, tmp_path / "run")
    assert "no tokenizer.json" in out
    assert "to train further" not in out
    (line,) = [line for line in out.splitlines() if "lather train" in line]
    assert line.startswith("training further needs the model's own tokenizer")
    assert line.endswith(" --data.tokenizer FILE")
    lather("export", tmp_path / "run", tmp_path / "out")
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(contents(tmp_path / "out")) == files
    error = lather("generate", tmp_path / "run", "--prompt", "x", status=2)
    assert "tokenizer.json" in error


def test_fields_are_ignored_as_told_and_recorded(
    copied: Path, tmp_path: Path, lather: Lather
) -> None:
    """The import says it, and the run's configuration; the other fields are still looked at."""
    file = copied / "config.json"
    change(file, final_logit_softcapping=30.0, scoring_func="sigmoid")
    error = lather("import", copied, tmp_path / "run", status=2)
    assert error.startswith(f"lather: error: {file}: final_logit_softcapping = 30.0 is not")
    ignored = ["--ignore-fields", "final_logit_softcapping"]
    error = lather("import", copied, tmp_path / "run", *ignored, status=2)
    assert error.startswith(f"lather: error: {file}: scoring_func = 'sigmoid' is not supported")
    ignored.append("scoring_func")
    out = lather("import", copied, tmp_path / "run", *ignored)
    assert f"note: {file}: ignored as told: final_logit_softcapping, scoring_func" in out
    config = load_config(tmp_path / "run/config.toml")
    assert config.ignore_fields == ("final_logit_softcapping", "scoring_func")


@pytest.mark.parametrize("has_tokenizer", [True, False], ids=["tokenizer", "none"])
def test_the_command_that_is_printed_trains_further_from_any_folder(
    has_tokenizer: bool,
    published: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lather: Lather,
) -> None:
    """The command trains at a rate far below that for random weights."""
    work, corpus, elsewhere = (tmp_path / name for name in ("my work", "corpus", "elsewhere"))
    for folder in (work, corpus, elsewhere):
        folder.mkdir()
    for n in range(40):
        (corpus / f"{n}.txt").write_text(f"def f{n}(x): return x + {n}\n" * 9)
    shutil.copytree(published, work / "in")
    if not has_tokenizer:
        (work / "in/tokenizer.json").rename(tmp_path / "tokenizer.json")
    monkeypatch.chdir(work)
    printed = lather("import", "in", "my run")
    (line,) = [line for line in printed.splitlines() if "lather train" in line]
    arguments = shlex.split(line[line.index("lather train") :])[1:]
    monkeypatch.chdir(elsewhere)
    places = {
        "my run": work / "my run",
        "my run/config.toml": work / "my run/config.toml",
        "NEW": "new",
        "FOLDER": corpus,
        "FILE": tmp_path / "tokenizer.json",
    }
    small = "--train.steps 1 --train.batch-size 2 --train.micro-batch-size 2 --log.sample-tokens 0 "
    small += "--train.sequence-length 16 --optim.schedule constant --optim.warmup-steps 0"
    printed = lather(*(places.get(word, word) for word in arguments), *small.split())
    assert "starting from the weights of" in printed
    assert [row["lr"] for row in timeless_rows(elsewhere / "new") if "lr" in row] == [1e-4]
    optim = load_config(work / "my run/config.toml").optim
    assert (optim.name, optim.lr) == (DEFAULT_RULE, 1e-4)
    assert optim.name == load_config(None, {"init_from": str(work / "my run")}).optim.name
    assert optim.lr < optim_config().peak_lr / 10
    assert (elsewhere / "new/tokenizer.json").is_file()


# --- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_bias": True}, "attention_bias = true is not supported"),
        ({"model_type": "mamba"}, "model_type = 'mamba' is not supported"),
        ({"hidden_size": 0}, "model.hidden_size = 0 is not valid"),
        ({"hidden_size": "24"}, "hidden_size = '24' is not valid"),
        ({"kv_lora_rank": None}, "missing fields: kv_lora_rank"),
        ({"vocab_size": 256}, "model.vocab_size = 256 is not valid: it must be at least 257"),
    ],
    ids=str,
)
def test_what_a_configuration_cannot_have_is_said_of_its_file(
    changes: dict[str, object], expected: str, tmp_path: Path, lather: Lather
) -> None:
    sizes = {"vocab_size": changes.get("vocab_size", 300)}
    save_hugging_face(tiny_model(**sizes), tiny_config(**sizes), tmp_path / "in")
    file = tmp_path / "in/config.json"
    change(file, **changes)
    error = lather("import", tmp_path / "in", tmp_path / "run", status=2)
    assert error.startswith(f"lather: error: {file}: {expected}")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def untie(folder: Path) -> None:
    change(folder / "config.json", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": 1.01 * tensors["model.embed_tokens.weight"]}, file)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "not a usable tokenizer"),
        (untie, "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
        (cut, "model.safetensors: missing, truncated or damaged"),
    ],
)
def test_a_damaged_folder_leaves_no_run(
    damage: Callable[[Path], object], expected: str, copied: Path, lather: Lather
) -> None:
    damage(copied)
    assert expected in lather("import", copied, copied.with_name("run"), status=2)
    assert [path.name for path in copied.parent.iterdir()] == ["in"]


@pytest.mark.parametrize("name", ["state.json", FILE])
def test_a_damaged_checkpoint_is_not_exported(
    name: str, imported: Path, tmp_path: Path, lather: Lather
) -> None:
    run = tmp_path / "run"
    shutil.copytree(imported, run)
    content = bytearray((run / FIRST / name).read_bytes())
    content[-20] ^= 1
    (run / FIRST / name).write_bytes(content)
    error = lather("export", run, tmp_path / "out", status=2)
    assert f"{FIRST}/{name}: missing or damaged" in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_leaves_no_half_folder(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lather: Lather
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert "No space left on device" in lather("export", imported, tmp_path / "out", status=1)
    assert not list(tmp_path.iterdir())


def test_sizes() -> None:
    sizes = {"5GB": 5 * 10**9, "4GiB": 2**32, "1.5 MB": 1_500_000, "20kb": 20_000, "7": 7, "7B": 7}
    for text, num_bytes in sizes.items():
        assert parse_size(text, "--max-shard-size") == num_bytes
    for text in ("", "GB", "-5GB", "5TB", "5 G B", "0", "nan", "1e9", "5iB", "5G", "1000000001GB"):
        with pytest.raises(ConfigError, match=r"--max-shard-size = .* is not valid"):
            parse_size(text, "--max-shard-size")
