"""Runs tasks of lm-evaluation-harness (extra `lm-eval`) on a trained model: exports it to a
temporary folder, which the harness's own model for Hugging Face folders reads with transformers.

Weights are written in fp32. If the run was trained with bfloat16, transformers computes under
autocast, as the run did, and probabilities in fp32. Everything runs in one process.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lather.checkpoint.held import held_checkpoint
from lather.engine.step import pick_device
from lather.errors import UserError
from lather.models.families import family_of
from lather.train.trained_model import TrainedModel

INSTEAD = "evaluate it on held-out sets (DATA)"


def check_model(trained: TrainedModel) -> None:
    """Raise UserError if transformers does not have the family of the model or computes something
    else for it, or if the tokenizer has no token that ends a text."""
    config, classes = trained.config.model, transformers.CONFIG_MAPPING
    name = family_of(config).model_type
    if not (name in classes and classes[name] in transformers.MODEL_FOR_CAUSAL_LM_MAPPING):
        raise UserError(
            f"--tasks: transformers, which runs them, has no language model of the family "
            f"{name!r}: {INSTEAD}, or register the family with "
            "transformers.AutoModelForCausalLM"
        )
    if config.transformers_note:
        raise UserError(f"--tasks: {config.transformers_note}: {INSTEAD}")
    if not trained.stop_tokens(trained.tokenizer()):
        raise UserError(
            f"{trained.run}: its tokenizer has no end-of-text token, which tasks need: set "
            "data.end_of_text"
        )


def run_tasks(
    trained: TrainedModel,
    tasks: Sequence[str],
    manager: TaskManager,
    *,
    context: int,
    batch_size: int = 8,
    limit: int = 0,
    shots: int = -1,
    chat: bool = False,
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task. `manager`: from `find_tasks`; `context`: tokens that the
    model reads; `batch_size`: requests per batch; `limit`: documents per task, 0 for all; `shots`:
    examples before each document, negative for the task's own number; `chat`: format documents
    with the chat template.

    Raises UserError if the tasks' data is missing and cannot be downloaded, or if a text that is
    scored or generated is longer than `context`; ExchangeError if the model cannot be exported.
    """
    names = ",".join(tasks)
    with tempfile.TemporaryDirectory(prefix="lather-") as folder:
        model = _exported(trained, Path(folder) / "model", context, batch_size)
        try:
            results = lm_eval.simple_evaluate(
                model=model,
                tasks=list(tasks),
                num_fewshot=None if shots < 0 else shots,
                limit=limit or None,
                apply_chat_template=chat,
                task_manager=manager,
                log_samples=False,
                bootstrap_iters=1000,
            )["results"]
        except AssertionError as error:  # so HFLM refuses lengths
            reason = str(error) or "a continuation is longer"
            raise UserError(
                f"--tasks {names}: the model reads {context} tokens ({reason}): give more "
                "(--sequence-length)"
            ) from None
        except OSError as error:
            if error.errno is not None:
                raise
            raise UserError(
                f"--tasks {names}: their data cannot be downloaded ({error}): connect, or "
                "download it before"
            ) from None
    return {
        task: {name: value for name, value in row.items() if isinstance(value, float)}
        for task, row in results.items()
    }


def _exported(trained: TrainedModel, folder: Path, context: int, batch_size: int) -> HFLM:
    """Write the model to `folder`; return the harness's model of it, with the tokenizer, the end
    of documents and the chat template of the run."""
    with held_checkpoint(trained.run, lambda: trained.checkpoint) as checkpoint:
        replace(trained, checkpoint=checkpoint).export(folder, torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        folder,
        model_max_length=sys.maxsize,  # HFLM cuts texts to `context`
    )
    if tokenizer.eos_token is None:
        ends = trained.stop_tokens(trained.tokenizer())
        named = tokenizer.convert_tokens_to_ids(trained.config.data.end_of_text)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(named if named in ends else min(ends))
    if not tokenizer.chat_template:
        tokenizer.chat_template = trained.chat_template().source
    is_mixed = trained.config.train.precision == "bf16"
    return HFLM(
        str(folder),
        tokenizer=tokenizer,
        device=str(pick_device("auto")),
        batch_size=batch_size,
        max_length=context,
        mixed_precision_dtype=torch.bfloat16 if is_mixed else None,
        softmax_dtype=torch.float32 if is_mixed else None,
    )


def find_tasks(tasks: Iterable[str], folder: Path | None = None) -> tuple[TaskManager, list[str]]:
    """Return a manager of the harness's tasks and those of `folder`, and the names of the tasks
    that `tasks` (with wildcards) match.

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
    return manager, list(names)
