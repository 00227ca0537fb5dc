"""The model for lm-evaluation-harness, on a task made on the spot; its answers against direct
computation."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

lm_eval = pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from lather.cli import main  # noqa: E402
from lather.errors import UserError  # noqa: E402
from lather.evaluation import harness  # noqa: E402
from lather.evaluation.harness import HarnessModel, _batch, find_tasks, run_tasks  # noqa: E402
from lather.generation.text import ContinuedText  # noqa: E402
from lather.models.generate import Sampling  # noqa: E402
from tiny_run import write_config  # noqa: E402

CONTEXT = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert (
        main(
            [
                "train",
                str(write_config(folder, steps=8)),
                "--run-dir",
                str(folder / "run"),
                "--log.sample-tokens",
                "0",
            ]
        )
        == 0
    )
    return folder / "run"


@pytest.fixture(scope="module")
def model(run: Path) -> HarnessModel:
    return HarnessModel(str(run), batch_size=3)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@torch.no_grad()
def expected(model: HarnessModel, before: list[int], after: list[int]) -> tuple[float, bool]:
    """Compute the expected score from the logits of this one text, of which the last inputs are
    read."""
    inputs = [*before, *after][:-1][-CONTEXT:]
    logits = model._decoder(torch.tensor([inputs])).logits_BSV[0, -len(after) :].double()
    labels = torch.tensor(after)
    return -F.cross_entropy(logits, labels, reduction="sum").item(), bool(
        (logits.argmax(-1) == labels).all()
    )


def greedy(model: HarnessModel, tokens: list[int], count: int) -> list[int]:
    more = list(tokens)
    for _ in range(count):
        more.append(int(model._decoder(torch.tensor([more[-CONTEXT:]])).logits_BSV[0, -1].argmax()))
    return more[len(tokens) :]


def test_log_likelihoods_are_those_of_each_text_alone(model: HarnessModel) -> None:
    pairs = [
        ("def f", "(x):"),
        ("", "return"),
        ("x" * 40, " + 1"),
        ("a ", "b"),
        ("def", " f1(x):\n    return"),
    ]
    likely = model.tok_encode("def")
    pairs.append(("def", model._text_tokenizer.decode(greedy(model, likely, 1))))
    found = model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    whole = [model.tok_encode(context + continuation) for context, continuation in pairs]
    starts = [len(model.tok_encode(context.rstrip(" "))) for context, _ in pairs]
    for (value, is_greedy), tokens, start in zip(found, whole, starts, strict=True):
        before = tokens[:start] or [model.prefix_token_id]
        value_alone, is_greedy_alone = expected(model, before, tokens[start:])
        assert value == pytest.approx(value_alone, rel=1e-5)
        assert is_greedy == is_greedy_alone
    assert {is_greedy for _, is_greedy in found} == {True, False}
    assert len({round(value, 3) for value, _ in found}) == len(pairs)


def test_shorter_rows_of_a_batch_are_padded_with_no_token() -> None:
    batch = _batch([([1, 2], [3]), ([3, 4, 5], [6, 7]), ([9], [10])], 3)
    assert batch.padding_BS is not None
    assert batch.inputs_BS.tolist() == [[1, 2, 0], [4, 5, 6], [9, 0, 0]]
    assert batch.padding_BS.tolist() == [[False, False, True], [False] * 3, [False, True, True]]


def test_rolling_log_likelihoods_predict_every_token_once(model: HarnessModel) -> None:
    texts = ["short", "def f(x):\n    return x + 1\n" * 4, ""]
    found = model.loglikelihood_rolling(
        requests("loglikelihood_rolling", *[(text,) for text in texts]), disable_tqdm=True
    )
    assert found[2] == 0
    for value, text in zip(found[:2], texts, strict=False):
        tokens = [model.prefix_token_id, *model.tok_encode(text, add_special_tokens=False)]
        windows = [tokens[: CONTEXT + 1]]
        sums = expected(model, windows[0][:1], windows[0][1:])[0]
        for start in range(CONTEXT + 1, len(tokens), CONTEXT):
            stop = min(start + CONTEXT, len(tokens))
            sums += expected(model, tokens[stop - CONTEXT - 1 : start], tokens[start:stop])[0]
        assert value == pytest.approx(sums, rel=1e-5)


def test_texts_end_where_the_task_says(model: HarnessModel) -> None:
    contexts = ["def f", "return x +", "    x", "def"]
    wishes = {"until": [], "max_gen_toks": 6}
    free = model.generate_until(
        requests("generate_until", *[(context, wishes) for context in contexts]), disable_tqdm=True
    )
    tokenizer = model._text_tokenizer
    alone = [greedy(model, model.tok_encode(context)[-(CONTEXT - 6) :], 6) for context in contexts]
    assert free == [tokenizer.decode(tokens) for tokens in alone]
    shorter = [(contexts[0], {"until": [], "max_gen_toks": 2})]
    assert model.generate_until(requests("generate_until", *shorter), disable_tqdm=True) == [
        tokenizer.decode(alone[0][:2])
    ]
    sampling = {"do_sample": True, "temperature": 3.0, "max_gen_toks": 6}
    (sampled,) = model.generate_until(
        requests("generate_until", (contexts[0], sampling)), disable_tqdm=True
    )
    assert sampled != free[0]
    stop = next(letter for letter in sampled if sampled.index(letter) > 1)
    ended = model.generate_until(
        requests("generate_until", (contexts[0], sampling | {"until": stop})), disable_tqdm=True
    )
    assert ended == [sampled[: sampled.index(stop)]]


def test_a_special_token_among_the_ends_ends_a_text(
    model: HarnessModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def continued(*arguments: Any, **options: Any) -> list[Any]:
        seen.append((arguments[2], arguments[3], options))
        return [ContinuedText("x", 1, True) for _ in arguments[2]]

    monkeypatch.setattr(harness, "continue_texts", continued)
    monkeypatch.setattr(model, "_ends", frozenset())
    wishes = [
        {"until": ["<|endoftext|>"], "max_gen_toks": 4},
        {"max_gen_toks": 500, "do_sample": True, "temperature": 0.0, "top_k": 0, "top_p": 0.5},
        {"max_gen_toks": 4, "do_sample": True},
    ]
    model.generate_until(
        requests("generate_until", *(("def f(x): " * 20, each) for each in wishes)),
        disable_tqdm=True,
    )
    (prompt, ending, _), (half, _, options), (_, _, sampled) = seen
    assert ending.stop_tokens == {model._text_tokenizer.token_to_id("<|endoftext|>")}
    assert [len(prompt[0]), len(half[0])] == [CONTEXT - 4, CONTEXT // 2]
    assert options["sampling"] == Sampling(0.0, 0, 0.5)
    assert sampled["sampling"] == Sampling(1.0, 50, 1.0)


def test_conversations_are_written_by_the_template(run: Path) -> None:
    model = HarnessModel(f"{run}@4")
    history = [{"role": "user", "content": "hi"}]
    assert (
        model.apply_chat_template(history)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        model.apply_chat_template(history, add_generation_prompt=False)
        == "<|im_start|>user\nhi<|im_end|>\n"
    )
    begun = [*history, {"role": "assistant", "content": "The answer"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith(
        "<|im_start|>assistant\nThe answer"
    )
    assert "im_start" in (model.chat_template(True) or "")
    assert model.tokenizer_name == HarnessModel(str(run)).tokenizer_name


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a task of four questions with choices, and one of texts, over JSONL files. Finding the
    harness's own thousands takes seconds."""
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {
            "question": f"def f{n}(x):\n    return x +",
            "choices": [" 1", " None", " y if x"],
            "answer": n % 3,
        }
        for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = (
        "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{tmp_path / 'rows.jsonl'}\ntest_split: test\n"
    )
    questions = (
        "output_type: multiple_choice\ndoc_to_text: "
        '"{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
    )
    texts = (
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: '
        '"{{question}}"\nmetric_list:\n  - metric: bits_per_byte\n'
    )
    (tmp_path / "small_questions.yaml").write_text(f"task: small_questions\n{data}{questions}")
    (tmp_path / "small_texts.yaml").write_text(f"task: small_texts\n{data}{texts}")
    return tmp_path


def test_names_of_tasks_may_have_wildcards(task_folder: Path) -> None:
    _, found = find_tasks(["small_*"], task_folder)
    assert sorted(found) == ["small_questions", "small_texts"]


def test_a_task_made_on_the_spot_has_the_accuracy_of_direct_computation(
    model: HarnessModel, task_folder: Path
) -> None:
    tasks = ["small_questions", "small_texts"]
    manager, names = find_tasks(tasks, task_folder)
    found = run_tasks(model, names, manager)
    rows = [json.loads(line) for line in (task_folder / "rows.jsonl").read_text().splitlines()]
    right, nats, num_bytes = 0, 0.0, 0
    for row in rows:
        start = len(model.tok_encode(row["question"]))
        wholes = [model.tok_encode(f"{row['question']} {choice}") for choice in row["choices"]]
        values = [expected(model, tokens[:start], tokens[start:])[0] for tokens in wholes]
        right += values.index(max(values)) == row["answer"]
        tokens = model.tok_encode(row["question"])
        assert len(tokens) <= CONTEXT
        nats -= expected(model, [model.prefix_token_id], tokens)[0]
        num_bytes += len(row["question"].encode())
    assert found["small_questions"]["acc,none"] == right / len(rows)
    assert 0 < right < len(rows)
    assert found["small_texts"]["bits_per_byte,none"] == pytest.approx(
        nats / math.log(2) / num_bytes, rel=1e-5
    )


def test_the_command_shows_tasks_and_records_them(
    run: Path, task_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--tasks",
        "small_questions",
        "--task-folder",
        str(task_folder),
        "--limit",
        "2",
        "--num-fewshot",
        "0",
    ]
    assert main(["eval", str(run), *options]) == 0
    assert "small_questions" in capsys.readouterr().out
    assert main(["eval", str(run), *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    row = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert row == printed
    assert row["sets"] == {}
    assert 0 <= row["tasks"]["small_questions"]["acc,none"] <= 1


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


def test_the_harness_finds_the_model_by_name(run: Path) -> None:
    found = lm_eval.api.registry.get_model("lather")
    assert found is HarnessModel
    model = found.create_from_arg_string(
        f"run={run}@4,context=8", {"batch_size": 2, "device": "cpu"}
    )
    assert (model._context, model._batch_size) == (8, 2)


def test_what_cannot_be_run_is_refused(
    run: Path, model: HarnessModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "--tasks", "no_such_task_anywhere"]) == 2
    assert "--tasks no_such_task_anywhere: no such task" in capsys.readouterr().err
    assert (
        main(["eval", str(run), "--tasks", "small", "--task-folder", str(tmp_path / "absent")]) == 2
    )
    assert "not a folder" in capsys.readouterr().err
    with pytest.raises(UserError, match="batch_size = 'auto'"):
        HarnessModel(str(run), batch_size="auto")
    with pytest.raises(UserError, match="but the model reads 16: give more"):
        model.loglikelihood(requests("loglikelihood", ("a", "b" * 40)), disable_tqdm=True)
