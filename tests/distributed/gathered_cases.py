"""`ownership="replicated"`: parameters whose state lies in rows on all ranks, and goes from there to owners and back."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from sharded_cases import LAYOUTS, SHAPES, Spread, make_spread, trained

CASES = (
    ("fsdp", "soap", torch.float32),
    ("hsdp", "soap_rotate", torch.float32),
    ("fsdp x tp", "stacked_soap", torch.float32),
    ("in another order", "kl_soap", torch.bfloat16),
)
FREQUENCY = 3


def gathered_differences(rank: int, world_size: int) -> list[str]:
    """What is not bit for bit what one process computes: in ten steps in which the state goes from rows to owners and back to rows."""
    wrong = []
    for name, kind, dtype in CASES:
        layout = LAYOUTS[world_size][name]
        mesh = layout.mesh()
        expected, _ = trained(kind, dtype, 10, FREQUENCY)
        case = f"{name}, {kind}"
        before: Spread | None = None
        for ownership, steps in (("replicated", range(4)), ("whole", range(4, 7)), ("replicated", range(7, 10))):
            run = make_spread(kind, layout, dtype, mesh, precondition_frequency=FREQUENCY, ownership=ownership)
            if before is not None:
                with torch.no_grad():
                    for p, q in zip(run.params, before.params, strict=True):
                        p.copy_(q)
                run.optimizer.load_state_dict(before.optimizer.state_dict())
                assert run.optimizer.param_groups[0]["ownership"] == ownership
            run.run(steps)
            before = run
        assert before is not None
        wrong += [
            f"{case}: parameter {i} {SHAPES[i]}"
            for i, (p, q) in enumerate(zip(before.whole(), expected, strict=True))
            if not torch.equal(p, q.detach())
        ]
        wrong += [f"{case}: {what}" for what in rows_that_are_wrong(before)]
    dist.barrier()
    return wrong


def rows_that_are_wrong(run: Spread) -> list[str]:
    """Entries whose rows on all ranks are not the whole entry once."""
    pieces = [piece for piece in run.optimizer.state_pieces() if piece.key != "step" and len(piece.shape) == 2]
    own = torch.tensor([piece.value.numel() for piece in pieces])
    total = own.clone()
    dist.all_reduce(total)
    wrong = []
    for piece, here, everywhere in zip(pieces, own.tolist(), total.tolist(), strict=True):
        whole = math.prod(piece.shape)
        if everywhere != whole or (piece.shape[0] >= run.mesh.size() and here == whole):
            wrong.append(f"{piece.key} of {tuple(piece.param.shape)}: {here} of {whole} here, {everywhere} on all ranks")
    return wrong
