"""`lather bench distributed`: counts what a rank of a sharded optimizer sends, keeps and computes;
counts are exact on any machine.

    counts    SOAP on 4 gloo ranks, parameters sharded on dim 0 as FSDP2 does: bytes that leave a
              rank in a step, bytes of its state, and flops of a step with a refresh, against one
              process; and the bytes that gathering gradient, L and R on every rank would send
    plan      the owners of every matrix of published models on 8, 64 and 512 ranks: the work of the
              busiest rank, over the mean

A case is checked first: after the counted steps every parameter has the bits of one process. Flops
of products are counted by torch's FlopCounterMode; QR and eigendecompositions are added by formula
(4/3 n^3 and 9 n^3), for every contestant alike.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.check import CheckError
from benchmarks.report import Row, RowFile, environment, gather
from lather.config.toml_file import load_config
from lather.console import command_console
from lather.errors import require
from lather.models.families import build_model
from lather.optim import SOAP, MatrixOptimizer, parameter_groups, state_bytes
from lather.optim.batched.layouts import layout_of
from lather.optim.rules.adamw import AdamWRule
from lather.optim.rules.soap import SOAPRule
from lather.optim.sharded.owners import share_out
from lather.optim.sharded.placement import Spread, boxes_of
from lather.parallel.launch.start import launch
from lather.parallel.launch.world import World
from lather.torch_private import linalg_eigh as eigh_of_torch

NUM_RANKS = 4
SHAPES: tuple[tuple[int, ...], ...] = ((128, 128),) * 8 + ((256, 128),) * 8 + ((8, 64, 128),) * 4
"""Matrices, and stacks of experts that each of 4 ranks has whole; every rank has as much work as
every other."""
UNEVEN: tuple[tuple[int, ...], ...] = ((128, 128),) * 5 + ((96, 160),) * 3 + ((6, 64, 128),) * 3
STEPS = 4
MESHES = (8, 64, 512)
ENOUGH = 20
"""Number of matrices per rank from which on the work should be even."""


@dataclass(frozen=True)
class DistributedBenchmark:
    """Counts bytes, state and arithmetic of a sharded optimizer, and how evenly the
    owners of matrices share the work. On CPU, with gloo."""

    parts: tuple[Literal["counts", "plan"], ...] = ("counts", "plan")
    """Parts to run."""
    out: Path = Path("benchmarks/results")
    """Folder for distributed-optimizer.jsonl; a run replaces it."""

    def __post_init__(self) -> None:
        require(bool(self.parts), "--parts", self.parts, "some of counts, plan")


def run(options: DistributedBenchmark) -> int:
    """Run the benchmark; returns the exit status, 1 if a case failed its check."""
    console = command_console()
    common = environment(torch.device("cpu"), ())
    file = RowFile(options.out / "distributed-optimizer.jsonl")
    rows = gather(_rows(options), common, file, console)
    if not rows:
        return 1
    for row in rows:
        console.print(row["summary"], highlight=False)
    console.print(f"rows {file.path}", highlight=False)
    return 0


def _rows(options: DistributedBenchmark) -> Iterator[Row]:
    if "counts" in options.parts:
        for name, shapes in (("even", SHAPES), ("uneven", UNEVEN)):
            yield _counts_row(name, shapes)
    if "plan" in options.parts:
        for preset in ("qwen3-30b-a3b", "deepseek-v2-lite"):
            for num_ranks in MESHES:
                yield owners_row(preset, num_ranks)


# --- counts ---------------------------------------------------------------------------------------


def _counts_row(name: str, shapes: Sequence[tuple[int, ...]]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        if launch(count, (tuple(shapes), folder), NUM_RANKS):
            raise CheckError(f"{name}: a rank failed, see above")
        ranks: list[Row] = json.loads((Path(folder) / "ranks.json").read_text("utf-8"))
    if wrong := [rank["wrong"] for rank in ranks if rank["wrong"]]:
        raise CheckError(
            f"{name}: {wrong[0]} of {len(shapes)} parameters differ from those of one process"
        )
    flops, alone = [rank["flops"] for rank in ranks], ranks[0]["flops_of_one_process"]
    state, whole = (
        [rank["state_bytes"] for rank in ranks],
        sum(_state_bytes(shape) for shape in shapes),
    )
    sent = max(rank["bytes_sent"] for rank in ranks)
    share = 4 * sum(math.prod(shape) for shape in shapes) / NUM_RANKS
    bound = 2 * (NUM_RANKS - 1) / NUM_RANKS * share
    shares = {
        "sent_of_bound": sent / bound,
        "sent_of_gathering": sent / max(rank["bytes_gathering"] for rank in ranks),
        "state_of_one_process_over_n": max(state) * NUM_RANKS / whole,
        "flops_of_one_process_over_n": max(flops) * NUM_RANKS / alone,
    }
    summary = (
        f"{name}: a rank sends {sent:,} bytes in a step, {shares['sent_of_bound']:.2f} of "
        f"2 (N-1)/N of its share and {shares['sent_of_gathering']:.2f} of what gathering G, L and "
        f"R sends; state {shares['state_of_one_process_over_n']:.3f} / N, "
        f"flops {shares['flops_of_one_process_over_n']:.3f} / N of one process"
    )
    config = {
        "case": name,
        "ranks": NUM_RANKS,
        "shapes": [list(shape) for shape in shapes],
        "optimizer": "SOAP",
        "precondition_frequency": 1,
    }
    return {
        "benchmark": "counts",
        "config": config,
        "check": {"parameters_that_differ": 0},
        **shares,
        "by_rank": ranks,
        "summary": summary,
    }


def _state_bytes(shape: tuple[int, ...]) -> int:
    return state_bytes(shape, matrix_layout="per_expert" if len(shape) > 2 else "tensor")


def _values(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _soap(params: Sequence[nn.Parameter]) -> SOAP:
    groups = [
        {"params": [p], "matrix_layout": "per_expert" if p.dim() > 2 else "tensor"} for p in params
    ]
    return SOAP(groups, lr=1e-2, precondition_frequency=1)


def count(shapes: tuple[tuple[int, ...], ...], folder: str, world: World) -> int:
    """Count on a rank, as a worker of `launch`; rank 0 writes the counts of all ranks."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world.size,))
    alone = [nn.Parameter(x) for x in _values(shapes, 0)]
    ours = [
        nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None))
        for p in alone
    ]
    whole, sharded = _soap(alone), _soap(ours)
    flops = flops_alone = sent = 0
    for step in range(STEPS):
        for p, q, grad in zip(alone, ours, _values(shapes, 100 + step), strict=True):
            p.grad, q.grad = grad, distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
        flops_alone = _counted_flops(whole)
        with CountedBytes() as counted:
            flops = _counted_flops(sharded)
        sent = counted.sent
    counts = {
        "wrong": sum(
            not torch.equal(p.detach(), cast(DTensor, q.detach()).full_tensor())
            for p, q in zip(alone, ours, strict=True)
        ),
        "flops": flops,
        "flops_of_one_process": flops_alone,
        "bytes_sent": sent,
        "bytes_gathering": gathering_bytes(ours, mesh),
        "state_bytes": sum(
            piece.value.nbytes for _, piece in sharded.state_pieces() if piece.name != "step"
        ),
    }
    everybody: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(counts, everybody)
    if everybody is not None:
        (Path(folder) / "ranks.json").write_text(json.dumps(everybody))
    return 0


def _counted_flops(optimizer: MatrixOptimizer) -> int:
    def qr(shape: Sequence[int], *args: Any, **kwargs: Any) -> int:
        return int(4 / 3 * math.prod(shape) * shape[-1])

    def eigh(shape: Sequence[int], *args: Any, **kwargs: Any) -> int:
        return 9 * math.prod(shape) * shape[-1]

    mapping = {torch.ops.aten.linalg_qr: qr, eigh_of_torch: eigh}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        optimizer.step()
    return int(counter.get_total_flops())


class CountedBytes:
    """Counts, inside the block, the bytes that collectives send from this rank to others."""

    def __init__(self) -> None:
        self.sent = 0
        self._patches = [
            patch.object(
                dist,
                "all_to_all_single",
                self._counting(dist.all_to_all_single, self._of_all_to_all),
            ),
            patch.object(dist, "all_reduce", self._counting(dist.all_reduce, self._of_all_reduce)),
            patch.object(dist, "all_gather", self._counting(dist.all_gather, self._of_all_gather)),
        ]

    def __enter__(self) -> CountedBytes:
        for patched in self._patches:
            patched.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for patched in self._patches:
            patched.stop()

    def _counting(self, original: Any, size: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.sent += size(*args)
            return original(*args, **kwargs)

        return counting

    def _of_all_to_all(
        self, arriving: Tensor, leaving: Tensor, sizes_in: list[int], sizes_out: list[int]
    ) -> int:
        return leaving.element_size() * (sum(sizes_out) - sizes_out[dist.get_rank()])

    def _of_all_reduce(self, x: Tensor, *args: Any) -> int:
        # a ring sends every part twice
        return int(2 * x.nbytes * (dist.get_world_size() - 1) / dist.get_world_size())

    def _of_all_gather(self, gathered: list[Tensor], part: Tensor) -> int:
        return part.nbytes * (dist.get_world_size() - 1)  # a ring passes on what it received


def gathering_bytes(params: Sequence[nn.Parameter], mesh: DeviceMesh) -> int:
    """The bytes that this rank would send if every rank gathered gradient, L and R of every matrix,
    in equal parts; experts that are whole stay where they are."""
    with CountedBytes() as counted:
        for p in params:
            assert isinstance(p, DTensor)
            if p.dim() > 2 and p.shape[0] % mesh.size() == 0:
                continue
            batch, (m, n) = math.prod(p.shape[:-2]), p.shape[-2:]
            for numel in (batch * m * n, batch * m * m, batch * n * n):
                part = torch.zeros(-(-numel // mesh.size()))
                dist.all_gather([torch.empty_like(part) for _ in range(mesh.size())], part)
    return counted.sent


# --- owners ---------------------------------------------------------------------------------------


def owners_row(preset: str, num_ranks: int) -> Row:
    """Make the row of a published model under FSDP2 on one mesh of all ranks: every matrix is
    sharded on dim 0, and experts are stacked."""
    config = load_config(Path(__file__).parents[1] / "configs" / f"{preset}.toml").model
    groups = parameter_groups(build_model(config, None, torch.device("meta")))
    options = SOAP([{**group, "params": list(group["params"])} for group in groups]).param_groups
    wanted, spreads = [], {}
    for group in options:
        rule = (
            AdamWRule()
            if group.get("rule") == "adamw"
            else SOAPRule(matrix_layout=group["matrix_layout"])
        )
        for p in group["params"]:
            layout = layout_of(tuple(p.shape), rule)
            if not layout.elementwise:
                key = tuple(p.shape)
                if key not in spreads:
                    spreads[key] = Spread(
                        key, tuple(range(num_ranks)), boxes_of(key, (num_ranks,), [Shard(0)]), 0
                    )
                wanted.append((spreads[key], layout))
    loads, counts, stays = [0.0] * num_ranks, [0] * num_ranks, 0
    for (_, layout), units in zip(wanted, share_out(wanted, {}), strict=True):
        for unit in units:
            loads[unit.owner] += layout.rule.cost(layout.matrix)
            counts[unit.owner] += 1
            stays += unit.stays
    imbalance = max(loads) * num_ranks / sum(loads)
    each = sum(counts) / num_ranks
    target = "" if each >= ENOUGH else f", fewer than {ENOUGH}"
    return {
        "benchmark": "plan",
        "config": {"model": preset, "ranks": num_ranks, "layout": "FSDP2 on one axis"},
        "matrices": sum(counts),
        "stay": stays,
        "max_over_mean": imbalance,
        "summary": f"{preset} on {num_ranks} ranks: {each:.1f} matrices per rank{target}; "
        f"the busiest has {imbalance:.4f} of the mean; "
        f"{stays:,} of {sum(counts):,} matrices never travel",
    }
