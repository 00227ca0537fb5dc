"""The DualPipeV action table of `torch.distributed.pipelining`, made without stages, process groups or a job.

torch makes the table while it constructs a `ScheduleDualPipeV`, which wants live stages; the functions that do the work need two numbers of
it. They are private, so what is taken from them stands here, with a check: `_calculate_single_rank_operations` is the order of the
forward and backward chunks on a rank, `_add_unshard_reshard`, `_add_reduce_grad` and `_add_send_recv` put FSDP's actions and the
transfers in. Without them Lather would carry a copy of the schedule; there is no public name for it.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from lather.errors import UserError

STAGES_OF_A_RANK = 2
"""How many stages torch looks ahead for parameters to gather: all that a rank has. Its default, 3, gives the same table, but looks for
a third stage through the rest of the table at every action: 10 s instead of 0.3 s for 64 ranks and 512 micro-batches."""


def dualpipev_actions(num_ranks: int, num_micro_batches: int) -> list[list[Any]]:
    """torch's actions by rank, each with `stage_index`, `computation_type.value`, `microbatch_index` and `sub_actions`.

    `num_micro_batches` must be at least 2 * num_ranks. Raises UserError if this torch has no such table.
    """
    try:
        schedules: Any = import_module("torch.distributed.pipelining.schedules")
        calculate = schedules.ScheduleDualPipeV._calculate_single_rank_operations
        sizes = SimpleNamespace(pp_group_size=num_ranks, _n_microbatches=num_micro_batches)
        gathered = {r: schedules._add_unshard_reshard(calculate(sizes, r), STAGES_OF_A_RANK) for r in range(num_ranks)}
        reduced = {r: schedules._add_reduce_grad(actions, num_micro_batches) for r, actions in gathered.items()}
        stages = STAGES_OF_A_RANK * num_ranks
        table = schedules._add_send_recv(reduced, lambda stage: min(stage, stages - 1 - stage), stages)
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(
            f"torch {torch.__version__} does not make DualPipeV's table as torch 2.11 to 2.13 do ({error!r}): install one of these"
        ) from error
    return [table[rank] for rank in range(num_ranks)]
