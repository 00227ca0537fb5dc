"""`lather plan`: each kind of bytes from first principles, refusals, and the output.
(tests/distributed has plans against real ranks.)"""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from left_tensors import config_with_sinks, count_left
from planned_configs import SIZES, config_of, dry_run_of_units
from torch import nn

from lather.cli import main
from lather.config.optim import optim_config
from lather.config.records import CheckpointConfig
from lather.memory import plan_report
from lather.memory.dry_rank import BUILDING, Load, shortened
from lather.memory.dry_run import FIRST, RankRun
from lather.memory.ledger import KINDS, MemoryTimeline
from lather.memory.plan import MemoryPlan, plan
from lather.memory.workers import Assumed, worker_processes
from lather.models.families import FAMILIES, build_model
from lather.models.lora import LoraConfig

OUTER = ("embed_tokens", "lm_head")
ROOT = Path(__file__).parents[2]


def parameters() -> dict[str, nn.Parameter]:
    return dict(
        build_model(
            FAMILIES["qwen3_moe"].config(**SIZES), None, torch.device("meta")
        ).named_parameters()
    )


def unit_sizes() -> list[int]:
    """Return the bytes of each block, the embedding, and the norm with the head, largest first."""
    units: Counter[str] = Counter()
    for name, p in parameters().items():
        match = re.match(r"layers\.\d+|embed_tokens", name)
        units[match[0] if match else "head"] += 4 * p.numel()
    return sorted(units.values(), reverse=True)


@pytest.fixture(scope="module")
def planned() -> MemoryPlan:
    """A plan of SOAP, with AdamW for embedding, head, routers and norms, in one process with bf16
    products."""
    return plan(config_of("soap", precision="bf16"), 1, Assumed())


def test_what_the_passes_of_a_cuda_graph_hold_stays_in_the_optimizers_step(
    planned: MemoryPlan,
) -> None:
    config = replace(planned.config, train=replace(planned.config.train, cuda_graph=True))
    plain, captured = (
        plan(each, 1, Assumed()).ranks[0].steps["a step"] for each in (planned.config, config)
    )

    def update_of(timeline: MemoryTimeline) -> int:
        return next(start for name, start, _ in timeline.spans() if name == "optimizer, update")

    most = plain.total[: update_of(plain)].max()
    held = captured.total[update_of(captured)]
    assert 0.999 * most <= held <= 1.01 * most
    assert captured.peak > max(plain.peak, most)


def test_offloaded_state_is_in_the_hosts_memory_and_visits_the_device(
    planned: MemoryPlan,
) -> None:
    """All of it is fetched in a step; bases are written back in one of ten."""
    timeline = planned.ranks[0].steps["a step"]
    kept = {kind: size for kind, size in timeline.at(-1).items() if kind.startswith("optimizer")}
    config = replace(planned.config, optim=optim_config("soap", offload=True))
    offloaded = plan(config, 1, Assumed())
    run, state = offloaded.ranks[0], sum(kept.values())
    assert run.host.visiting == state
    assert state <= run.host.pinned <= 1.25 * state
    assert planned.host.pinned == 0
    fetched, written = offloaded.bus
    assert (fetched, written) == (state, state - 0.9 * kept["optimizer bases"])
    for step in run.steps.values():
        assert not any(kind.startswith("optimizer") for kind in step.at_peak)
    (line,) = (x for x in plan_report.remarks(offloaded, None) if x.startswith("offloaded"))
    assert "0.00 GiB of pinned memory of the host per rank, 0.00 per machine of 1" in line
    assert "at 25 GB/s each way" in line
    assert not [x for x in plan_report.remarks(planned, None) if x.startswith("offloaded")]
    assert plan_report.to_json(offloaded)["ranks"][0]["host"]["visiting"] == state


def test_frozen_weights_are_fetched_for_every_pass() -> None:
    """Blocks are fetched twice per micro-batch, for its forward and its backward pass; the head
    stays from a forward to a backward pass, and the embedding from that to the next forward pass.
    The embedding is also the first that a step fetches."""
    config = config_of("muon", batch_size=16)
    loop = replace(config.train, offload_frozen=True)
    offloaded = plan(replace(config, train=loop, lora=LoraConfig(rank=4)), 1, Assumed())
    sizes = {name: 4 * p.numel() for name, p in parameters().items()}
    embedding = sizes["embed_tokens.weight"]
    blocks = sum(size for name, size in sizes.items() if name.startswith("layers."))
    per_micro_batch = sum(sizes.values()) + blocks
    assert offloaded.frozen == embedding + 16 * per_micro_batch
    (line,) = (x for x in plan_report.remarks(offloaded, None) if x.startswith("offloaded"))
    assert "GiB of frozen weights are fetched for the passes of all micro-batches" in line
    assert plan_report.to_json(offloaded)["ranks"][0]["host"]["frozen"] == offloaded.frozen
    assert plan(replace(config, lora=LoraConfig(rank=4)), 1, Assumed()).frozen == 0


def test_every_kind_from_first_principles(planned: MemoryPlan) -> None:
    """There are fp32 parameters and gradients; two moments for each element; for each side of a
    matrix, also of each expert's, the triangle of a factor, and a basis; and bf16 copies of the
    operands of products."""
    timeline = planned.ranks[0].steps["a step"]
    at_end = timeline.at(timeline.curves.shape[1] - 1)
    elements = sum(p.numel() for p in parameters().values())
    of_blocks = [
        p
        for name, p in parameters().items()
        if p.dim() > 1 and not name.startswith(OUTER) and not name.endswith("gate.weight")
    ]
    sides = [n for p in of_blocks for n in (len(p) if p.dim() == 3 else 1) * p.shape[-2:]]
    assert at_end["parameters"] == 4 * elements
    assert at_end["optimizer moments"] == 2 * 4 * elements
    assert at_end["optimizer bases"] == 4 * sum(n * n for n in sides)
    assert at_end["optimizer factors"] == 4 * sum(n * (n + 1) // 2 for n in sides)
    most = {kind: int(row.max()) for kind, row in zip(KINDS, timeline.curves, strict=True)}
    assert most["gradients"] == 4 * elements
    assert most["rounded weights"] == 2 * sum(p.numel() for p in of_blocks)


def test_activations_of_a_forward_from_first_principles() -> None:
    """The tensors that two layers keep of T tokens in fp32, by segment; numbers per token count
    elements of four bytes.

        attention   queries and output (H d each), keys and values (G d each), the residual behind
                    (D), flash attention's logsumexp (H), the inverse root of each norm (2 of rows,
                    H + G of heads); the router's scores (E), its K weights before and after they
                    are normalized, their sum, K experts in int64; rows of each expert in int64
        experts     gate and up of K experts (2 K F), token and place of each of the K pairs in
                    int64; ends of the experts' rows between segments
        head        the input of its product (D), inverse root of the norm, logsumexp, the label in
                    int64
        between     the input of each layer and of the head (D); the losses
    """
    layers, tokens, heads, groups, width, size, experts, chosen = (
        SIZES["num_hidden_layers"],
        32,
        2,
        2,
        32,
        64,
        4,
        2,
    )
    timeline = plan(config_of("adamw"), 1, Assumed()).ranks[0].steps["a step"]
    times = {mark.name: mark.time for mark in timeline.marks}
    before, after = (timeline.segments_at(times[name]) for name in ("0F0", "0B0"))
    attention = (
        2 * (heads + groups) * width
        + size
        + heads
        + 2
        + heads
        + groups
        + experts
        + 2 * chosen
        + 1
        + 2 * chosen
    )
    tables = 2 * 4 * tokens * width // 2  # cosines and sines of half a head, which all layers share
    assert 0 <= after["attention"] - layers * (4 * tokens * attention + 8 * experts) - tables < 200
    kept_by_experts = 4 * tokens * (2 * chosen * SIZES["moe_intermediate_size"] + 4 * chosen)
    assert 0 <= after["experts"] - layers * kept_by_experts < layers * 16 * experts
    losses = 4 + 4  # the gradient of the loss, and the vector of losses, which is returned
    assert after["between segments"] - before["between segments"] == (
        (layers + 1) * 4 * tokens * size + losses
    )
    assert after["head"] == 4 * tokens * (size + 1 + 1 + 2)


@pytest.mark.parametrize(
    ("precision", "width"), [pytest.param("fp32", 4, marks=pytest.mark.grid), ("bf16", 2)]
)
def test_what_travels_are_micro_batches_of_activations(precision: str, width: int) -> None:
    """Micro-batches have 32 tokens of 64 elements. There are at most two sends under way, a receive
    for each of the rank's stages, and in bf16 the copy that is sent next. Besides, numbers of rows
    per expert, of 8 bytes each, may be on their way."""
    for run in plan(
        config_of("adamw", parallel={"pp": 2}, precision=precision), 2, Assumed()
    ).ranks:
        timeline = run.steps["a step"]
        tensors, rest = np.divmod(timeline.curves[KINDS.index("communication")], 32 * 64 * width)
        assert 3 <= tensors.max() <= 4 + (precision == "bf16")
        assert rest.max() < 200


def test_gathered_parameters_are_whole() -> None:
    """The parameters of a stage are gathered from the forward on; block by block there are those of
    a block, and perhaps of the next, beside what arrives of one."""
    first, second, *_ = sizes = unit_sizes()

    def gathered(mode: str) -> tuple[Any, int]:
        config = config_of("adamw", parallel={"gather": mode})
        timeline = workers.submit(dry_run_of_units, config, 2, Assumed()).result().steps["a step"]
        forward = next(mark.time for mark in timeline.marks if mark.name == "0F0")
        return timeline.of_kind("gathered parameters"), forward

    with worker_processes() as workers:
        at_once, forward = gathered("stage")
        by_block, _ = gathered("block")
    assert at_once[forward + 1] == sum(sizes)
    assert first <= by_block.max() <= first + second + first
    assert by_block.max() < sum(sizes)


def test_no_tensor_of_a_dry_run_waits_for_the_garbage_collector() -> None:
    """It would be counted for as long as the collector happens not to run."""
    with worker_processes() as workers:
        assert workers.submit(count_left, config_with_sinks()).result(timeout=120) == 0


def test_a_step_needs_most_where_activations_are(planned: MemoryPlan) -> None:
    run = planned.largest
    assert set(run.steps) == {BUILDING, FIRST, "a checkpoint", "a step"}
    timeline = run.steps["a step"]
    assert timeline.peak == run.peak == int(timeline.total.max())
    assert sum(timeline.at(timeline.peak_time).values()) == run.peak
    assert (
        sum(timeline.segments_at(timeline.peak_time).values())
        == timeline.at(timeline.peak_time)["activations"]
    )
    assert planned.needed == run.peak + planned.allowance > run.peak


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.grid), 4])
def test_an_asynchronous_checkpoint_has_copies_of_all_that_it_writes(world_size: int) -> None:
    """It has two moments and the weights of each element, factors and bases, a step counter for
    each parameter, and the generator's state."""
    config = config_of("soap", parallel={"ep": world_size // 2 or 1})
    at_once, copied = (
        plan(
            replace(config, checkpoint=CheckpointConfig(asynchronous=flag)),
            world_size,
            Assumed("cpu"),
        ).largest
        for flag in (False, True)
    )
    assert at_once.checkpoint_bytes == copied.checkpoint_bytes
    for step in ("a checkpoint", "a step"):
        assert copied.steps[step].peak == at_once.steps[step].peak + copied.checkpoint_bytes
    before = at_once.steps["a checkpoint"].at(-1)
    # views: nothing is gathered for it
    assert at_once.steps["a checkpoint"].peak <= sum(before.values()) + 5120
    stays = [
        size
        for kind, size in before.items()
        if kind == "parameters" or kind.startswith("optimizer")
    ]
    extra = copied.checkpoint_bytes - sum(stays)
    assert 0 <= extra - torch.get_rng_state().nbytes < 1024


@pytest.fixture(scope="module")
def alone() -> RankRun:
    """AdamW in one process on a CPU."""
    return plan(config_of("adamw"), 1, Assumed("cpu")).largest


def test_sharding_divides_parameters_gradients_and_state(alone: RankRun) -> None:
    whole = alone.steps["a step"]
    shared = plan(config_of("adamw", parallel={"ep": 2}), 4, Assumed("cpu")).largest.steps["a step"]
    for kind in ("parameters", "optimizer moments"):
        row = KINDS.index(kind)
        ratio = whole.curves[row].max() / shared.curves[row].max()
        assert 3.9 < ratio <= 4, kind


def test_a_part_gets_memory_unit_by_unit(alone: RankRun) -> None:
    """One process has the parameters alone; of two data ranks, each has half of them, and one unit
    whole until it is sharded."""
    whole, largest = sum(unit_sizes()), max(unit_sizes())
    with worker_processes() as workers:
        shared = (
            workers.submit(dry_run_of_units, config_of("adamw"), 2, Assumed("cpu"))
            .result(timeout=120)
            .steps[BUILDING]
            .peak
        )
    assert whole <= alone.steps[BUILDING].peak < 1.01 * whole  # buffers take a few bytes
    assert whole / 2 < shared < whole / 2 + 1.01 * largest


@pytest.mark.grid
def test_more_micro_batches_than_are_walked_change_only_what_tokens_take() -> None:
    """Only the tokens and labels of 8 bytes grow, and a few numbers of each micro-batch."""
    few, many = (
        plan(config_of("adamw", parallel={"pp": 2}, batch_size=size), 2, Assumed("cpu"))
        for size in (6, 24)
    )
    for one, other in zip(few.ranks, many.ranks, strict=True):
        assert other.peak - one.peak == 18 * 2 * 8 * 32


def test_only_as_many_micro_batches_are_walked_as_matter() -> None:
    """They are two more than fill a pipeline of two ranks, and two for one rank."""
    config = shortened(config_of("adamw", parallel={"pp": 2}, batch_size=64), 4)
    assert config.num_micro_batches(2) == 6
    assert shortened(config_of("adamw", batch_size=2), 1).num_micro_batches(1) == 2
    grows = {"first_batch_size": 8, "batch_growth_steps": 9, "batch_size": 64}
    assert shortened(config_of("adamw", parallel={"pp": 2}, **grows), 4) == config


def test_rows_of_an_even_load() -> None:
    """With 4 experts on 2 ranks and 2 experts per token, C(2, 2) / C(4, 2) of the tokens have no
    expert of a rank's."""
    load = Load(config_of("adamw", parallel={"ep": 2}), tokens=600, imbalance=1.0)
    assert load.rows == 500
    assert load.pairs == 600
    uneven = Load(config_of("adamw", parallel={"ep": 2}), tokens=600, imbalance=1.5)
    assert (uneven.rows, uneven.pairs) == (600, 900)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_shows_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "--train.sequence-length",
        "32",
        "--train.batch-size",
        "2",
        "--model.num-hidden-layers",
        "1",
    ]
    arguments = ["plan", "configs/quickstart.toml", "--device", "cpu", *small]
    files = ["--out", str(tmp_path / "plan.png"), "--json", str(tmp_path / "plan.json")]
    assert main([*arguments, "--memory", "10GiB", *files]) == 0
    shown = capsys.readouterr().out
    assert "fits in 10.00 GiB" in shown
    document = json.loads((tmp_path / "plan.json").read_text())
    (rank,) = document["ranks"]
    assert (
        document["needed"] == rank["peak"] == max(step["peak"] for step in rank["steps"].values())
    )
    assert sum(rank["steps"]["a step"]["kinds"].values()) == rank["steps"]["a step"]["peak"]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--memory", f"{document['needed'] - 1}B", "--advice", "never"]) == 1
    assert "does not fit" in capsys.readouterr().out
