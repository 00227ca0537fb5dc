"""Runs tasks of lm-evaluation-harness (extra `lm-eval`) on a trained model, in one process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import lm_eval
from lm_eval.tasks import TaskManager

from lather.errors import UserError
from lather.evaluation.harness_model import TasksModel
from lather.train.trained_model import AS_TRAINED, Running, TrainedModel


class Tasks(NamedTuple):
    """Tasks of the harness."""

    manager: TaskManager
    names: list[str]


def check_model(trained: TrainedModel) -> None:
    """Raise UserError if the tokenizer has no token that ends a text."""
    if not trained.stop_tokens(trained.tokenizer()):
        raise UserError(
            f"{trained.run}: its tokenizer has no end-of-text token, which tasks need: set "
            "data.end_of_text"
        )


def run_tasks(
    trained: TrainedModel,
    tasks: Tasks,
    *,
    context: int,
    running: Running = AS_TRAINED,
    batch_size: int = 8,
    limit: int = 0,
    shots: int = -1,
    chat: bool = False,
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task. `context`: tokens that the model reads; `batch_size`:
    requests per batch; `limit`: documents per task, 0 for all; `shots`: examples before each
    document, negative for the task's own number; `chat`: format documents with the chat template.

    Raises UserError if the tasks' data is missing and cannot be downloaded, if a text that is
    scored or generated is longer than `context`, or if texts are to be generated in a way that
    Lather does not have.
    """
    with (
        trained.running(running) as decoder,
        trained.precision(decoder.device, running.dtype),
    ):
        try:
            results = lm_eval.simple_evaluate(
                model=TasksModel(trained, decoder, context=context, batch_size=batch_size),
                tasks=tasks.names,
                num_fewshot=None if shots < 0 else shots,
                limit=limit or None,
                apply_chat_template=chat,
                task_manager=tasks.manager,
                log_samples=False,
                bootstrap_iters=1000,
            )["results"]
        except OSError as error:
            if error.errno is not None:
                raise
            raise UserError(
                f"--tasks {','.join(tasks.names)}: their data cannot be downloaded ({error}): "
                "connect, or download it before"
            ) from None
    return {
        task: {name: value for name, value in row.items() if isinstance(value, float)}
        for task, row in results.items()
    }


def find_tasks(tasks: Iterable[str], folder: Path | None = None) -> Tasks:
    """Find those of the harness's tasks and of those of `folder` that `tasks` (with wildcards)
    match.

    Raises UserError if one of `tasks` matches none.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"--task-folder {folder}: not a folder: give one with YAML files of tasks")
    manager = TaskManager(include_path=None if folder is None else str(folder))
    names: dict[str, None] = {}
    for task in tasks:
        matched = manager.match_tasks([task])
        names |= dict.fromkeys(matched)
        if not matched:
            raise UserError(
                f"--tasks {task}: no such task: `python -m lm_eval ls tasks` lists them, and "
                "--task-folder adds your own"
            )
    return Tasks(manager, list(names))
