"""Tasks of lm-evaluation-harness, on tasks made on the spot: transformers' results of the exported
model against direct computation with Lather's."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
transformers = pytest.importorskip("transformers", reason="the extra lm-eval is not installed")

from lm_eval.tasks import TaskManager  # noqa: E402

from lather.cli import main  # noqa: E402
from lather.errors import UserError  # noqa: E402
from lather.evaluation import harness  # noqa: E402
from lather.evaluation.harness import find_tasks, run_tasks  # noqa: E402
from lather.models.decoder import Decoder  # noqa: E402
from lather.train.trained_model import TrainedModel  # noqa: E402
from tiny_run import write_config  # noqa: E402

CONTEXT, NUM_TOKENS = 16, 6
GROUPED_QUERIES = """\
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
num_experts_per_tok = 2
head_dim = 8
hidden_size = 16
vocab_size = 300
max_position_embeddings = 64
"""
MODELS = {
    "qwen3_moe": f"{GROUPED_QUERIES}moe_intermediate_size = 8\nnum_experts = 4\n",
    "gpt_oss": f"{GROUPED_QUERIES}intermediate_size = 8\nnum_local_experts = 4\n"
    "sliding_window = 8\n",
}


def train(folder: Path, *options: str, model_type: str = "deepseek_v2") -> Path:
    config = write_config(folder, steps=8)
    if model_type in MODELS:
        _, start, rest = config.read_text().partition("[data]")
        model = f'model_type = "{model_type}"\n{MODELS[model_type]}'
        config.write_text(f"[model]\n{model}\n{start}{rest}")
    arguments = [str(config), "--run-dir", str(folder / "run"), "--log.sample-tokens", "0"]
    assert main(["train", *arguments, *options]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module", params=["deepseek_v2", "qwen3_moe", "gpt_oss", "adapters"])
def trained(
    request: pytest.FixtureRequest, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainedModel:
    if request.param == "deepseek_v2":
        return TrainedModel.find(str(run))
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "adapters":
        options = ["--lora.rank", "2", "--lora.targets", "attention", "experts"]
        return TrainedModel.find(
            str(train(folder, "--init-from", str(run), "--optim.lr", "1e-2", *options))
        )
    return TrainedModel.find(str(train(folder, model_type=request.param)))


@torch.no_grad()
def nats(decoder: Decoder, before: list[int], after: list[int]) -> float:
    """Return the nats of the tokens `after`, from the logits of this one text, of which the last
    inputs are read."""
    inputs = [*before, *after][:-1][-CONTEXT:]
    logits = decoder(torch.tensor([inputs])).logits_BSV[0, -len(after) :].double()
    return F.cross_entropy(logits, torch.tensor(after), reduction="sum").item()


@torch.no_grad()
def greedy(decoder: Decoder, tokenizer: Tokenizer, text: str) -> str:
    tokens: list[int] = tokenizer.encode(text).ids[-(CONTEXT - NUM_TOKENS) :]
    for _ in range(NUM_TOKENS):
        tokens.append(int(decoder(torch.tensor([tokens])).logits_BSV[0, -1].argmax()))
    return str(tokenizer.decode(tokens[-NUM_TOKENS:]))


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make tasks of questions with choices, of texts and of answers, over JSONL files. Finding the
    harness's own thousands takes seconds."""
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {
            "question": f"def f{n}(x):\n    return x +",
            "choices": [" 1", " None", " y if x"],
            "answer": n % 3,
            "text": "def f(x):\n    return x + 1\n" * (n + 1),
            "generated": "",
        }
        for n in range(4)
    ]
    write_rows(tmp_path, rows)
    data = (
        "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{tmp_path / 'rows.jsonl'}\ntest_split: test\n"
    )
    tasks = {
        "questions": 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n',
        "texts": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\n'
        'doc_to_target: "{{text}}"\nmetric_list:\n  - metric: bits_per_byte\n',
        "words": 'output_type: loglikelihood\ndoc_to_text: "{{question}}"\n'
        'doc_to_target: " x"\nmetric_list:\n  - metric: perplexity\n',
        "answers": 'output_type: generate_until\ndoc_to_text: "{{question}}"\n'
        'doc_to_target: "{{generated}}"\ngeneration_kwargs:\n'
        f"  until: []\n  max_gen_toks: {NUM_TOKENS}\n"
        "metric_list:\n  - metric: exact_match\n",
    }
    for name, lines in tasks.items():
        (tmp_path / f"small_{name}.yaml").write_text(f"task: small_{name}\n{data}{lines}")
    return tmp_path


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_names_of_tasks_may_have_wildcards(task_folder: Path) -> None:
    _, found = find_tasks(["small_t*", "small_w*"], task_folder)
    assert found == ["small_texts", "small_words"]


def test_tasks_have_the_results_of_direct_computation(
    trained: TrainedModel, task_folder: Path
) -> None:
    decoder, tokenizer = trained.decoder("cpu"), trained.tokenizer()
    encode = lambda text: tokenizer.encode(text).ids  # noqa: E731
    rows = [
        {**row, "generated": greedy(decoder, tokenizer, row["question"])}
        for row in read_rows(task_folder)
    ]
    write_rows(task_folder, rows)
    manager, names = find_tasks(["small_*"], task_folder)
    found = run_tasks(trained, names, manager, context=CONTEXT, batch_size=3)

    right, words = 0, []
    for row in rows:
        before = encode(row["question"])
        choices = [
            nats(decoder, before, encode(f"{row['question']} {choice}")[len(before) :])
            for choice in row["choices"]
        ]
        right += choices.index(min(choices)) == row["answer"]
        words.append(nats(decoder, before, encode(f"{row['question']} x")[len(before) :]))
    assert 0 < right < len(rows)
    assert found["small_questions"]["acc,none"] == right / len(rows)
    assert found["small_words"]["perplexity,none"] == pytest.approx(
        math.exp(sum(words) / len(words)), rel=1e-5
    )
    assert found["small_answers"]["exact_match,none"] == 1

    end, total, num_bytes = tokenizer.token_to_id("<|endoftext|>"), 0.0, 0
    for row in rows:
        tokens = [end, *encode(row["text"])]
        total += nats(decoder, tokens[:1], tokens[1 : CONTEXT + 1])
        for start in range(CONTEXT + 1, len(tokens), CONTEXT):
            stop = min(start + CONTEXT, len(tokens))
            total += nats(decoder, tokens[stop - CONTEXT - 1 : start], tokens[start:stop])
        num_bytes += len(row["text"].encode())
    assert found["small_texts"]["bits_per_byte,none"] == pytest.approx(
        total / math.log(2) / num_bytes, rel=1e-5
    )


def test_the_command_shows_tasks_and_records_them(
    run: Path, task_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = ["--tasks", "small_questions", "--task-folder", str(task_folder)]
    options = [*tasks, "--limit", "2", "--num-fewshot", "0"]
    assert main(["eval", str(run), *options]) == 0
    assert "small_questions" in capsys.readouterr().out
    assert main(["eval", str(run), *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    row = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert row == printed
    assert row["sets"] == {}
    assert 0 <= row["tasks"]["small_questions"]["acc,none"] <= 1


def test_the_harness_gets_the_options_and_the_conversations_of_the_run(
    run: Path, task_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without a chat template writes ChatML, as `lather generate --chat` does."""
    given: dict[str, Any] = {}

    def evaluate(**options: Any) -> dict[str, Any]:
        given.update(options)
        return {"results": {}}

    monkeypatch.setattr(lm_eval, "simple_evaluate", evaluate)
    tasks = ["--tasks", "small_texts", "--task-folder", str(task_folder)]
    options = ["--limit", "3", "--num-fewshot", "2", "--chat-template", "--batch-size", "5"]
    assert main(["eval", f"{run}@4", *tasks, *options, "--sequence-length", "24"]) == 0
    assert (given["limit"], given["num_fewshot"], given["apply_chat_template"]) == (3, 2, True)
    model = given["model"]
    assert (model.batch_size, model.max_length) == (5, 24)
    written = model.apply_chat_template([{"role": "user", "content": "hi"}])
    assert written == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    end = TrainedModel.find(str(run)).tokenizer().token_to_id("<|endoftext|>")
    assert model.eot_token_id == model.prefix_token_id == end
    weights = TrainedModel.find(str(run), 4).decoder("cpu").embed_tokens.weight
    assert torch.equal(model.model.get_input_embeddings().weight, weights)


def test_transformers_computes_in_the_precision_of_the_run(run: Path, task_folder: Path) -> None:
    trained = TrainedModel.find(str(run))
    train = dataclasses.replace(trained.config.train, precision="bf16")
    mixed = dataclasses.replace(trained, config=dataclasses.replace(trained.config, train=train))
    manager, names = find_tasks(["small_words"], task_folder)
    in_fp32, in_bf16 = (
        run_tasks(model, names, manager, context=CONTEXT)["small_words"]["perplexity,none"]
        for model in (trained, mixed)
    )
    assert in_bf16 == pytest.approx(in_fp32, rel=2e-3)
    assert in_bf16 != in_fp32


@pytest.mark.parametrize(
    "error", [ConnectionError("no network"), FileNotFoundError("no such dataset")], ids=repr
)
def test_data_that_cannot_be_fetched_is_one_line(
    run: Path,
    task_folder: Path,
    error: OSError,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**options: Any) -> None:
        raise error

    monkeypatch.setattr(lm_eval, "simple_evaluate", fail)
    capsys.readouterr()
    assert (
        main(["eval", str(run), "--tasks", "small_questions", "--task-folder", str(task_folder)])
        == 2
    )
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lather")]
    assert f"their data cannot be downloaded ({error})" in line


def test_what_cannot_be_run_is_refused(
    run: Path,
    tmp_path: Path,
    task_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def message(*arguments: object) -> str:
        capsys.readouterr()
        assert main(["eval", *map(str, arguments)]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "lather: error" in line]
        return line

    folder = ["--task-folder", task_folder]
    assert "--tasks absent: no such task" in message(run, "--tasks", "absent", *folder)
    absent = ["--task-folder", tmp_path / "absent"]
    assert "not a folder" in message(run, "--tasks", "small", *absent)
    line = message(run, "--tasks", "small_answers", *folder, "--sequence-length", NUM_TOKENS)
    assert "the model reads 6 tokens (Invalid configuration" in line
    assert line.endswith("give more (--sequence-length)")
    monkeypatch.setattr(transformers, "CONFIG_MAPPING", {})
    line = message(run, "--tasks", "small_texts", *folder)
    assert "no language model of the family 'deepseek_v2': evaluate it on held-out sets" in line


def test_a_model_that_transformers_computes_differently_is_refused(run: Path) -> None:
    trained = TrainedModel.find(str(run))
    model = dataclasses.replace(trained.config.model, norm_topk_prob=True, num_experts_per_tok=2)
    config = dataclasses.replace(trained.config, model=model)
    with pytest.raises(UserError, match=r"ignores norm_topk_prob = true .* held-out sets \(DATA\)"):
        harness.check_model(dataclasses.replace(trained, config=config))


def test_a_tokenizer_without_an_end_of_text_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainedModel, "stop_tokens", lambda self, tokenizer: frozenset())
    with pytest.raises(UserError, match="no end-of-text token, which tasks need: set data"):
        harness.check_model(TrainedModel.find(str(run)))
