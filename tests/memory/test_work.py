"""The work that a plan counts: bytes that ranks send, and flops."""

import pytest
import torch
import torch.distributed as dist
from planned_configs import config_of

from lather.memory.plan import plan
from lather.memory.work import MICRO_BATCHES, REFRESH, REST, sent_bytes
from lather.memory.workers import Assumed
from lather.models.families import build_model
from lather.torch_private import start_fake_process_group


def test_bytes_that_experts_exchange() -> None:
    """Rows of hidden size travel to the other rank's experts and back, and so do their gradients,
    in fp32."""
    config = config_of("muon", parallel={"ep": 2}, batch_size=2)
    run = plan(config, 2, Assumed("cpu")).ranks[0]
    model, tokens = config.model, 32
    pairs = tokens * model.num_experts_per_tok
    least, most = (
        4 * rows * model.hidden_size * 4 * model.num_hidden_layers for rows in (tokens, 2 * pairs)
    )
    assert least <= run.work[MICRO_BATCHES].experts <= most


def test_bytes_sent_by_operation() -> None:
    whole, part = torch.zeros(8), torch.zeros(2)
    start_fake_process_group(0, 4, torch.device("cpu"))
    group = dist.group.WORLD.boxed()
    dist.destroy_process_group()
    sent = {
        name: sent_bytes(name, args)
        for name, args in {
            "_allgather_base_": (whole, part),
            "_reduce_scatter_base_": (part, whole),
            "allreduce_": ([whole], group),
            "alltoall_base_": (part, whole),
            "send": ([part],),
            "recv_": ([part],),
            "barrier": (),
        }.items()
    }
    assert sent == {
        "_allgather_base_": 24,
        "_reduce_scatter_base_": 24,
        "allreduce_": 48,
        "alltoall_base_": 32,
        "send": 8,
        "recv_": 0,
        "barrier": 0,
    }


def test_replicas_send_sums_of_gradients_once_per_step() -> None:
    """Each of two replicas sends the fp32 sums of all weights; what grows with micro-batches is
    within a replica, of which a single rank has nothing to send."""
    config = config_of("adamw", parallel={"replicas": 2}, batch_size=8)
    work = plan(config, 2, Assumed("cpu")).ranks[0].work
    assert work[MICRO_BATCHES].parameters == 0
    model = build_model(config.model, None, torch.device("meta"))
    weights = sum(p.numel() for p in model.parameters())
    assert work[REST].parameters == pytest.approx(4 * weights, rel=1e-3)


def test_work_grows_with_micro_batches() -> None:
    one, four = (
        plan(config_of("muon", batch_size=size), 1, Assumed("cpu")).ranks[0].work
        for size in (4, 16)
    )
    assert four[MICRO_BATCHES].flops == pytest.approx(4 * one[MICRO_BATCHES].flops)
    assert four[REST].flops == one[REST].flops
    model = config_of("muon").model
    experts = (
        6
        * 4
        * 32
        * model.num_experts_per_tok
        * 3
        * model.hidden_size
        * model.moe_intermediate_size
        * model.num_hidden_layers
    )
    assert one[MICRO_BATCHES].flops > experts
    assert all(work.sent == 0 for work in one.values())


def test_bytes_are_told_apart_by_what_they_are_for() -> None:
    """A rank of two pipeline and two data ranks sends activations and gradients of both of its
    stages, gathers and reduces the halves of its parameters, and gives gradients to owners."""
    config = config_of("muon", parallel={"pp": 2}, batch_size=16)
    found = plan(config.resolved(), 4, Assumed("cpu"))
    run, model = found.ranks[0], config.model
    assert run.work.keys() <= {MICRO_BATCHES, REFRESH, REST}
    tokens = 16 // 2 * config.train.sequence_length
    assert run.work[MICRO_BATCHES].pipeline == 2 * tokens * model.hidden_size * 4
    assert run.work[MICRO_BATCHES].experts == 0
    assert run.work[MICRO_BATCHES].parameters == 0
    parameters = run.steps["a step"].at(0)["parameters"]
    assert run.work[REST].parameters == pytest.approx(2 * parameters, rel=0.05)
    assert 0 < run.work[REST].optimizer <= 2 * parameters
    assert found.work.sent == pytest.approx(sum(work.sent for work in run.work.values()))
