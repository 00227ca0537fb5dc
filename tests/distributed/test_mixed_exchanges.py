"""Over ranks: parameters of equal shape under rules that do different things, and rules that
refuse."""

from __future__ import annotations

import torch
from library_layouts import step_both
from ranks import run_ranks
from sharded_cases import spread, values
from sharded_refusals import error_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer

SHAPES = ((6, 4), (6, 4))


def mixed_differences(rank: int, world_size: int) -> list[int]:
    """Train two matrices, alike but that only one has statistics; return the numbers of those that
    differ from one process."""
    mesh = init_device_mesh("cpu", (world_size,))

    def cut(i: int, x: Tensor) -> Tensor:
        return spread(x, mesh, [Shard(0)])

    def make(params: list[nn.Parameter]) -> MatrixOptimizer:
        groups = [{"params": params[:1], "max_precond_dim": 0}, {"params": params[1:]}]
        return KLSOAP(groups, lr=0.1, max_update_rms=1.0)

    whole = [nn.Parameter(x) for x in values(0, torch.float32, SHAPES)]
    parts = [nn.Parameter(cut(i, p.detach())) for i, p in enumerate(whole)]
    pairs = list(zip(whole, parts, strict=True))
    return step_both(
        make(whole),
        make(parts),
        pairs,
        lambda step: values(10 + step, torch.float32, SHAPES),
        cut,
        range(4),
    )


def test_statistics_of_some_of_an_exchange() -> None:
    assert run_ranks(mixed_differences, 2) == [[], []]


def refusals(rank: int, world_size: int) -> list[str]:
    """Collect the errors of steps, also on ranks that own nothing of what is refused, and again
    when the same is asked once more."""
    mesh = init_device_mesh("cpu", (world_size,))
    p, q = (nn.Parameter(spread(x, mesh, [Replicate()])) for x in values(0, torch.float32, SHAPES))
    for param in (p, q):
        param.grad = spread(torch.ones(6, 4), mesh, [Replicate()])
    soap = SOAP([p], precondition_frequency=lambda t: 0 if t == 4 else 2)
    errors = [error_of(soap.step)[:44] for _ in range(4)]
    for control in ({"keep_norm": True}, {"radial_brake": 0.5}):
        adamw = AdamW([q])
        adamw.step()
        adamw.param_groups[0].update(control)
        errors += [error_of(adamw.step)[:27] for _ in range(2)]
    adamw.param_groups[0].update({"radial_brake": 0.0, "cautious_decay": True})
    return [*errors, error_of(adamw.step)]


def test_what_is_refused_is_refused_on_all_ranks_and_every_time() -> None:
    expected = ["nothing"] * 3 + ["ValueError: precondition_frequency gives 0 f"]
    expected += ["ValueError: matrix_layout, "] * 4 + ["nothing"]
    assert run_ranks(refusals, 2) == [expected] * 2
