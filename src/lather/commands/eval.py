"""`lather eval RUN [DATA ...]`: evaluates a run on held-out sets, per token and per byte, or on
tasks of lm-evaluation-harness (`--tasks`)."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape

from lather.argument import Argument
from lather.commands.chosen_model import ChosenModel
from lather.commands.parsing import parse_arguments
from lather.config.records import Number
from lather.console import command_console, titled_table
from lather.errors import UserError
from lather.evaluation.scoring import bytes_per_token, score_set
from lather.evaluation.sets import HeldOutSet, open_sets
from lather.files import reason
from lather.lines import fit
from lather.optim.options import Count
from lather.train.published_model import find_model
from lather.train.trained_model import Running, TrainedModel

RECORD = "evaluations.jsonl"
"""File in the run directory with a row per evaluation."""
FORMS = {
    "sequences": ",",
    "tokens": ",",
    "loss": ".4f",
    "perplexity": ",.2f",
    "bits_per_byte": ".4f",
    "accuracy": ".1%",
}
"""Columns of the table of sets, and the form of their numbers."""


@dataclass(frozen=True)
class EvalArguments(ChosenModel):
    """Evaluate a checkpoint of a run in one process. Without DATA and --tasks, the run's own
    held-out sets are used."""

    run: Annotated[str, Argument(positional=True, metavar="RUN")]
    """Run directory, of which the newest checkpoint is evaluated; or RUN@STEP or RUN@best for
    another one; or a Hugging Face folder."""
    data: Annotated[tuple[str, ...], Argument(positional=True, metavar="[DATA ...]")] = ()
    """Data sets made by `lather data make`: FOLDER or NAME=FOLDER."""
    split: str = ""
    """Split to evaluate; empty: "validation", or "train" if a data set has no other."""
    max_sequences: Number = 0
    """Maximal number of sequences of each set, spread evenly over it; 0: all."""
    sequence_length: int = 0
    """Tokens per sequence; 0: `train.sequence_length`, or for tasks of a Hugging Face folder the
    model's positions, at most 4,096."""
    batch_size: Count = 8
    """Sequences, or requests of tasks, per batch."""
    json: bool = False
    """Print the results as one JSON object."""
    tasks: str = ""
    """Tasks of lm-evaluation-harness, separated by commas: hellaswag,arc_easy (extra `lm-eval`)."""
    task_folder: Path | None = None
    """Folder with tasks of your own (YAML files)."""
    limit: Number = 0
    """Documents per task; 0: all."""
    num_fewshot: int = -1
    """Examples before each document of a task; negative: the task's own number."""
    chat_template: bool = False
    """Format the tasks' documents as conversations, with the tokenizer's chat template."""


def eval_command(arguments: list[str]) -> None:
    """Evaluate, print a table (or an object with --json), and append the results to the run's
    record."""
    parsed = parse_arguments(EvalArguments, "lather eval", arguments)
    tasks = [task.strip() for task in parsed.tasks.split(",") if task.strip()]
    trained = find_model(parsed.run, parsed.step, parsed.weights)
    context = trained.context(parsed.sequence_length, "--sequence-length")
    _refuse_options_without_effect(parsed)
    run_tasks = _prepare_tasks(trained, tasks, parsed, context) if tasks else dict
    with_sets = parsed.data or not tasks
    length = parsed.sequence_length or trained.config.train.sequence_length
    sets = open_sets(trained, parsed.data, parsed.split, length) if with_sets else []
    result: dict[str, Any] = {
        "run": str(trained.run),
        "step": trained.step,
        "weights": trained.weights,
        "dtype": parsed.dtype,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "sequence_length": length if with_sets else context,
        "max_sequences": parsed.max_sequences,
        "sets": _score_sets(trained, sets, parsed),
        "tasks": {},
    }
    try:
        result["tasks"] = run_tasks()
    finally:  # keep the results of the sets if a task fails
        if result["sets"] or result["tasks"]:
            if parsed.json:
                print(json.dumps(result))
            else:
                _show(result, trained)
            if trained.is_run:
                _record(trained.run / RECORD, result)


def _refuse_options_without_effect(parsed: EvalArguments) -> None:
    of_tasks = {
        "--limit": parsed.limit,
        "--chat-template": parsed.chat_template,
        "--task-folder": parsed.task_folder,
        "--num-fewshot": parsed.num_fewshot >= 0,
    }
    of_sets = {"--split": parsed.split, "--max-sequences": parsed.max_sequences}
    for options, subject, applies in (
        (of_tasks, "tasks: give --tasks", parsed.tasks),
        (of_sets, "held-out sets: give DATA", parsed.data or not parsed.tasks),
    ):
        if not applies and (names := [name for name, value in options.items() if value]):
            raise UserError(f"{names[0]} applies to {subject}, or leave it out")


def _score_sets(
    trained: TrainedModel, sets: list[HeldOutSet], parsed: EvalArguments
) -> dict[str, dict[str, Any]]:
    if not sets:
        return {}
    vocab_size, rows = trained.config.model.vocab_size, {}
    with (
        trained.running(Running(parsed.dtype, parsed.layerwise)) as decoder,
        Console(stderr=True).status("") as status,
        trained.precision(decoder.device, parsed.dtype),
    ):
        for held_out in sets:
            label, tokenizer = escape(f"{held_out.name}, {held_out.split}"), held_out.tokenizer
            status.update(label)
            indices = held_out.indices(parsed.max_sequences)

            def show(done: int, label: str = label) -> None:
                status.update(f"{label}: {done:,} sequences")

            score = score_set(
                decoder,
                held_out.source,
                indices,
                parsed.batch_size,
                None if tokenizer is None else bytes_per_token(tokenizer, vocab_size),
                progress=show,
            )
            if not score.tokens:
                what = f"no token of its {len(indices)} sequences is learned, so it has no loss"
                print(f"{held_out.source.name}: {what}: give another set or split", file=sys.stderr)
            place = {"data": str(held_out.folder), "split": held_out.split}
            rows[held_out.name] = {**place, **score.as_row()}
    return rows


def _prepare_tasks(
    trained: TrainedModel, tasks: list[str], parsed: EvalArguments, context: int
) -> Callable[[], dict[str, Any]]:
    """Return the function that runs the tasks. Raises UserError if a package is not installed, if
    the harness lacks a task, or if the tokenizer has no end of text."""
    for package in ("lm_eval", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--tasks needs {package}, which is not installed: pip install 'lather[lm-eval]'"
            )
    from lather.evaluation.harness import check_model, find_tasks, run_tasks

    check_model(trained)
    found = find_tasks(tasks, parsed.task_folder)
    return lambda: run_tasks(
        trained,
        found,
        context=context,
        running=Running(parsed.dtype, parsed.layerwise),
        batch_size=parsed.batch_size,
        limit=parsed.limit,
        shots=parsed.num_fewshot,
        chat=parsed.chat_template,
    )


def _show(result: Mapping[str, Any], trained: TrainedModel) -> None:
    console = command_console()
    print(fit(f"{trained.checkpoint}, sequences of {result['sequence_length']} tokens"))
    if result["sets"]:
        table = titled_table(
            left=("set", "split"), right=(name.replace("_", " ") for name in FORMS)
        )
        for name, row in result["sets"].items():
            table.add_row(
                escape(name),
                row["split"],
                *(_number(row[key], form) for key, form in FORMS.items()),
            )
        console.print(table)
    if result["tasks"]:
        table = titled_table(left=("task", "metric"), right=("value", "± standard error"))
        for task, metrics in result["tasks"].items():
            for metric, value in metrics.items():
                name, _, form = metric.partition(",")
                if not name.endswith("_stderr"):
                    table.add_row(
                        escape(task),
                        escape(name),
                        f"{value:.4f}",
                        _number(metrics.get(f"{name}_stderr,{form}"), ".4f"),
                    )
        console.print(table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _record(path: Path, result: Mapping[str, Any]) -> None:
    """Append the results to the run's record. If it cannot be written, only warn: the results have
    been printed already."""
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    except OSError as error:
        print(f"not recorded: {path} cannot be written ({reason(error, path)})", file=sys.stderr)
        with contextlib.suppress(OSError):  # half a line
            os.truncate(path, before)
