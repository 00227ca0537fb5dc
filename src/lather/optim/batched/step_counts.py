"""Step counts of parameters: 0-d fp32 tensors on the host, in the state of each, as torch's
optimizers keep them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lather.optim.batched.buckets import States
from lather.optim.batched.roster import ParamInfo


def new_counts(values: Sequence[float]) -> list[Tensor]:
    """Return step counts side by side in memory (`are_side_by_side`)."""
    counts = torch.tensor(values, dtype=torch.float32, device="cpu")
    return [count.data for count in counts.unbind()]  # a view would hold its base when it is moved


def are_side_by_side(counts: Sequence[Tensor]) -> bool:
    """Whether step counts lie one after the other in memory, so that they can be changed by one
    launch in place of one for each."""
    if not counts:
        return False
    first, size = counts[0], counts[0].element_size()
    addresses = [first.data_ptr() + size * i for i in range(len(counts))]
    num_elements = first.untyped_storage().nbytes() // size
    return (
        first.storage_offset() + len(counts) <= num_elements
        and list(map(Tensor.data_ptr, counts)) == addresses
        and {x.dtype for x in counts} == {first.dtype}
    )


def step_counts(infos: Sequence[ParamInfo], state: States) -> dict[int, int]:
    """Return the step count of each parameter by its info's id; 0 for a parameter without state."""
    counts = [state[info.param]["step"] for info in infos if state.get(info.param)]
    values = iter(torch.stack(counts).tolist() if counts else ())
    return {id(info): int(next(values)) if state.get(info.param) else 0 for info in infos}
