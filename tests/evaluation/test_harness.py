"""Tasks of lm-evaluation-harness, on tasks made on the spot, against direct computation and against
the harness's own model, which runs the exported folder with transformers."""

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

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402

from lather.cli import main  # noqa: E402
from lather.errors import UserError  # noqa: E402
from lather.evaluation import harness, harness_model  # noqa: E402
from lather.evaluation.harness import find_tasks, run_tasks  # noqa: E402
from lather.evaluation.harness_model import TasksModel  # noqa: E402
from lather.models.decoder import Decoder  # noqa: E402
from lather.train.trained_model import Running, TrainedModel  # noqa: E402
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
    found = find_tasks(["small_t*", "small_w*"], task_folder)
    assert found.names == ["small_texts", "small_words"]


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
    found = run_tasks(trained, find_tasks(["small_*"], task_folder), context=CONTEXT, batch_size=3)

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


@pytest.mark.parametrize("begins", [False, True])
def test_answers_are_those_of_the_harness_own_model(
    trained: TrainedModel, begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`HFLM` reads the exported folder with transformers. With `begins`, the tokenizer puts a token
    before each text. Blocks that are read from disk give the same bits."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(trained.run / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = trained.chat_template().source
    if begins:
        tokenizer.bos_token = "def"
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single="def $A", special_tokens=[("def", tokenizer.bos_token_id)]
        )
    monkeypatch.setattr(harness_model, "_tokenizer", lambda trained: tokenizer)
    trained.export(tmp_path / "exported", torch.float32)
    context: dict[str, Any] = {"batch_size": 3, "max_length": 2 * CONTEXT}
    theirs = HFLM(str(tmp_path / "exported"), tokenizer=tokenizer, device="cpu", **context)
    expected = answers(theirs)
    for layerwise in ("never", "always"):
        with trained.running(Running(layerwise=layerwise), "cpu") as decoder:
            ours = TasksModel(trained, decoder, context=2 * CONTEXT, batch_size=3)
            actual = answers(ours)
        for kind in ("loglikelihood", "loglikelihood_rolling"):
            assert actual[kind] == pytest.approx(expected[kind], rel=1e-5)
        assert actual["generate_until"] == expected["generate_until"]
        assert actual["greedy"] == expected["greedy"]
        assert ours.apply_chat_template(CHAT) == theirs.apply_chat_template(CHAT)


CHAT = [{"role": "user", "content": "hi"}]


def answers(model: Any) -> dict[str, list[Any]]:
    """Ask for texts that are too long, without a context, with the same inputs, that begin with
    special tokens, and for further tokens up to ends that come early, late and never."""

    def ask(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
        requests = [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]
        found: list[Any] = getattr(model, kind)(requests, disable_tqdm=True)
        return found

    code = "def f(x):\n    return x + 1\n"
    pairs = [("", "return x"), ("x =", " 1"), ("x =", " x"), ("x = ", "y"), (code * 4, " None")]
    pairs += [("<|endoftext|>x", " = 1"), ("def f", "(x):\n    return"), (code, code[:20])]
    scores = ask("loglikelihood", *pairs)
    ends = [[], ["x"], ["\n", "return"], "1"]
    settings = [{"until": until, "max_gen_toks": NUM_TOKENS} for until in ends]
    return {
        "loglikelihood": [score for score, _ in scores],
        "greedy": [is_greedy for _, is_greedy in scores],
        "loglikelihood_rolling": ask("loglikelihood_rolling", (code,), (code * 5,), ("x",)),
        "generate_until": ask(
            "generate_until", *((text, each) for each in settings for text, _ in pairs if text)
        ),
    }


def test_a_model_that_transformers_computes_differently_runs(run: Path, task_folder: Path) -> None:
    trained = TrainedModel.find(str(run))
    model = dataclasses.replace(trained.config.model, norm_topk_prob=True, num_experts_per_tok=2)
    config = dataclasses.replace(trained.config, model=model)
    tasks = find_tasks(["small_words"], task_folder)
    perplexities = [
        run_tasks(each, tasks, context=CONTEXT)["small_words"]["perplexity,none"]
        for each in (trained, dataclasses.replace(trained, config=config))
    ]
    assert perplexities[0] != perplexities[1]


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
    assert torch.equal(model._decoder.embed_tokens.weight, weights)


def test_tasks_are_computed_in_the_precision_of_the_run(run: Path, task_folder: Path) -> None:
    trained = TrainedModel.find(str(run))
    train = dataclasses.replace(trained.config.train, precision="bf16")
    mixed = dataclasses.replace(trained, config=dataclasses.replace(trained.config, train=train))
    tasks = find_tasks(["small_words"], task_folder)
    in_fp32, in_bf16 = (
        run_tasks(model, tasks, context=CONTEXT)["small_words"]["perplexity,none"]
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
    assert "the model reads 6 tokens, and a task asks for 6 further ones" in line
    assert line.endswith("give more (--sequence-length)")
    line = message(run, "--tasks", "small_questions", *folder, "--sequence-length", 1)
    assert "the model reads 1 tokens, and a text to score has " in line
    file = task_folder / "small_answers.yaml"
    file.write_text(file.read_text().replace("until: []", "until: []\n  num_beams: 3"))
    line = message(run, "--tasks", "small_answers", *folder)
    assert "a task generates texts with num_beams = 3, which Lather does not have" in line


def test_a_tokenizer_without_an_end_of_text_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainedModel, "stop_tokens", lambda self, tokenizer: frozenset())
    with pytest.raises(UserError, match="no end-of-text token, which tasks need: set data"):
        harness.check_model(TrainedModel.find(str(run)))
