"""Rules for matrices under FSDP1, whose flat pieces they refuse, and `ZeroRedundancyOptimizer`."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from optim_helpers import all_same
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from lather.optim import (
    SOAP,
    AdamW,
    Muon,
    StackedSOAP,
    describe_parameters,
    parameter_groups,
    parameters_by_kind,
)


class Net(nn.Sequential):
    """Two matrices, a norm and biases."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4))


def fsdp1(net: nn.Module, *, originals: bool, strategy: str = "FULL_SHARD") -> Any:
    warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated
    return FullyShardedDataParallel(
        net,
        use_orig_params=originals,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
    )


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


REFUSAL = "FullyShardedDataParallel (FSDP1) has made, but {rule} needs whole matrices"

# --- FSDP1 ----------------------------------------------------------------------------------------


def refusals(rank: int, world_size: int) -> dict[str, list[str]]:
    """Return the errors of optimizers and of sorting by kind, for parameters of FSDP1: by the rule
    that refuses, and "kind"."""
    found: dict[str, list[str]] = {"kind": []}
    for originals, strategy in (
        *itertools.product((False, True), ("FULL_SHARD", "SHARD_GRAD_OP")),
        (False, "NO_SHARD"),
    ):
        net = fsdp1(Net(), originals=originals, strategy=strategy)
        params = list(net.parameters())
        optimizer = SOAP([nn.Parameter(torch.ones(4, 3))], lr=1e-2)
        ways: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("soap", partial(SOAP, params, lr=1e-2)),
            ("muon", partial(Muon, list(net.named_parameters()), lr=1e-2)),
            ("soap", partial(SOAP, params, lr=1e-2, matrix_layout="per_expert")),
            ("stacked_soap", partial(StackedSOAP, params, lr=1e-2)),
            ("adamw", partial(AdamW, params, lr=1e-2, keep_norm=True)),
            ("muon", partial(optimizer.add_param_group, {"params": params, "rule": "muon"})),
        )
        for rule, call in ways:
            found.setdefault(rule, []).append(error_of(call))
        assert len(optimizer.param_groups) == 1
        for sort in (parameter_groups, parameters_by_kind, describe_parameters):
            models = (net, list(net.named_parameters())) if strategy == "FULL_SHARD" else ()
            found["kind"] += [error_of(partial(sort, model)) for model in models]
    return found


def test_flat_pieces_of_fsdp1_are_refused_by_name_on_every_rank() -> None:
    """They look like vectors, which would take AdamW's step at the rate of matrices."""
    for found in run_ranks(refusals, 2):
        for error in found.pop("kind"):
            assert "FullyShardedDataParallel (FSDP1) has made, but the kind of a" in error
            assert "fully_shard (FSDP2)" in error
            assert "fsdp_version: 2" in error
        for rule, errors in found.items():
            for error in errors:
                assert REFUSAL.format(rule=rule) in error
                assert "fsdp_version: 2" in error


def flattened_later(rank: int, world_size: int) -> list[str]:
    """Return the errors of optimizers that were made before FSDP1, one of them also trained."""
    found = []
    for num_steps in (0, 2):
        net = Net()
        optimizer = SOAP(net.named_parameters(), lr=1e-2)
        train(net, optimizer, range(num_steps))
        model = fsdp1(net, originals=True)
        load = partial(optimizer.load_state_dict, {"state": {}, "param_groups": []})
        before = [p.detach().clone() for p in net.parameters()]
        state = copy.deepcopy(list(optimizer.state.values()))
        step = partial(train, model, optimizer, range(1))
        found += map(error_of, (optimizer.state_dict, load, step, optimizer.init_state))
        assert all_same(before, list(net.parameters()))
        for entries, others in zip(optimizer.state.values(), state, strict=True):
            assert all(torch.equal(entries[key], others[key]) for key in others)
    return found


def test_an_optimizer_made_before_fsdp1_raises_before_anything_changes() -> None:
    for found in run_ranks(flattened_later, 2):
        assert len(found) == 8
        for error in found:
            assert error.startswith("parameter '0.weight'")
            assert REFUSAL.format(rule="soap") in error


def elementwise(rank: int, world_size: int) -> list[float]:
    """Return the largest differences between AdamW on whole parameters and on FSDP1's after three
    steps, and after two more with a loaded state."""
    differences = []
    for originals in (False, True):
        net, sharded = Net(), fsdp1(Net(), originals=originals)
        one, other = AdamW(net.parameters(), lr=1e-2), AdamW(sharded.parameters(), lr=1e-2)
        train(net, one, range(3))
        train(sharded, other, range(3))
        differences.append(difference(net, sharded))
        fresh = AdamW(sharded.parameters(), lr=1e-2)
        fresh.load_state_dict(other.state_dict())
        train(net, one, range(3, 5))
        train(sharded, fresh, range(3, 5))
        differences.append(difference(net, sharded))
    return differences


def difference(net: nn.Module, sharded: Any) -> float:
    """Return the largest difference of an element of the parameters."""
    with sharded.summon_full_params(sharded):
        pairs = zip(net.parameters(), sharded.module.parameters(), strict=True)
        return max(float((p - q).detach().abs().max()) for p, q in pairs)


def test_adamw_is_right_on_flat_pieces() -> None:
    for differences in run_ranks(elementwise, 2):
        assert max(differences) < 1e-6


def whole_under_no_shard(rank: int, world_size: int) -> list[float]:
    differences = []
    makers: tuple[Callable[[nn.Module], torch.optim.Optimizer], ...] = (
        lambda net: SOAP(net.parameters(), lr=1e-2),
        lambda net: Muon(parameter_groups(net), lr=1e-2),
    )
    for make in makers:
        net, kept = Net(), fsdp1(Net(), originals=True, strategy="NO_SHARD")
        train(net, make(net), range(4))
        train(kept, make(kept), range(4))
        differences.append(difference(net, kept))
    return differences


def test_fsdp1_that_keeps_shapes_is_fine() -> None:
    """`NO_SHARD` marks the original parameters, matrices and vectors, and leaves them whole."""
    for differences in run_ranks(whole_under_no_shard, 2):
        assert max(differences) < 1e-6


def empty_shards(rank: int, world_size: int) -> list[str]:
    """Return the warnings for FSDP2's parameters, of which the last rank has no rows."""
    net = nn.Linear(3, 2, bias=False)
    fully_shard(net)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer = Muon(net.parameters(), lr=1e-2)
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.state_dict()
    return [str(one.message) for one in found if "rule for matrices" in str(one.message)]


def test_empty_shards_of_fsdp2_are_matrices() -> None:
    assert run_ranks(empty_shards, 3) == [[], [], []]


# --- ZeroRedundancyOptimizer ----------------------------------------------------------------------


def wrapped(params: Any, cls: type[torch.optim.Optimizer], **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes seconds

    return ZeroRedundancyOptimizer(params, cls, lr=1e-2, **options)


def plain_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of `parameter_groups` without names."""
    groups = parameter_groups(net, rest_lr=3e-2)
    return [{**group, "params": [p for _, p in group["params"]]} for group in groups]


def state_of(wrapper: Any) -> dict[str, Any]:
    """Return the state of all ranks, on every rank."""
    wrapper.consolidate_state_dict(to=0)
    box = [wrapper.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return copy.deepcopy(box[0])  # type: ignore[return-value]


def zero(rank: int, world_size: int) -> list[str]:
    """Name what differs from one process."""
    wrong = []
    for cls in (SOAP, Muon):
        for groups_of in (lambda net: list(net.parameters()), plain_groups):
            for views in (False, True):
                net, twin, resumed = Net(), Net(), Net()
                alone = cls(groups_of(net), lr=1e-2)
                options = {"parameters_as_bucket_view": views}
                wrapper = wrapped(groups_of(twin), cls, **options)
                again = wrapped(groups_of(resumed), cls, **options)
                train(net, alone, range(3))
                train(twin, wrapper, range(3))
                with torch.no_grad():
                    for p, q in zip(resumed.parameters(), twin.parameters(), strict=True):
                        p.copy_(q)
                again.load_state_dict(state_of(wrapper))
                train(net, alone, range(3, 6))
                train(resumed, again, range(3, 6))
                if not all_same(list(net.parameters()), list(resumed.parameters())):
                    wrong.append(f"{cls.__name__} {groups_of.__name__} {views}")
    return wrong


def test_zero_redundancy_optimizer_has_the_bits_of_one_process() -> None:
    assert run_ranks(zero, 3) == [[]] * 3


def named_under_zero(rank: int, world_size: int) -> list[str]:
    found = []
    for params in (list(Net().named_parameters()), parameter_groups(Net())):
        for cls in (torch.optim.AdamW, SOAP):
            try:
                wrapped(params, cls)
            except (TypeError, AttributeError) as error:
                found.append(str(error))
    return found


def test_zero_redundancy_optimizer_takes_no_named_pairs_for_any_optimizer() -> None:
    """docs/your-trainer.md says what to pass instead."""
    for found in run_ranks(named_under_zero, 2):
        assert len(found) == 4
