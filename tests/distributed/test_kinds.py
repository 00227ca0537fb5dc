"""Kinds of parameters of models that are wrapped for several ranks: those of the model itself."""

from __future__ import annotations

from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lather.optim import describe_parameters


class VocabParallelEmbedding(nn.Module):
    """An embedding of another library, known by the name of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Embedding(8, 4).weight.detach())


class Model(nn.Module):
    """A model with a module for each rule about owners; shards of one row are no vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.words = nn.Embedding(8, 4), VocabParallelEmbedding()
        self.to_two = nn.Linear(4, 2, bias=False)
        self.filters, self.norm = nn.Conv1d(4, 4, 3, groups=4), nn.LayerNorm((4, 2))
        self.readout = nn.Linear(4, 8, bias=False)
        self.readout.weight = self.table.weight
        self.mix = nn.Parameter(nn.Linear(4, 2).weight.detach())


KINDS = {
    "table.weight": "rest",
    "words.weight": "rest",
    "to_two.weight": "matrices",
    "filters.weight": "rest",
    "filters.bias": "rest",
    "norm.weight": "rest",
    "norm.bias": "rest",
    "mix": "matrices?",
}


def kinds_of(model: nn.Module, prefix: str = "") -> dict[str, str]:
    decisions = describe_parameters(model)
    names = [each.name.removeprefix(prefix) for each in decisions]
    kinds = [f"{each.kind}{'?' * each.is_guess}" for each in decisions]
    return dict(zip(names, kinds, strict=True))


def wrapped_kinds(rank: int, world_size: int) -> list[dict[str, str]]:
    """Return the kinds under DDP, under FSDP2, and under FSDP2 over tensor parallelism."""
    replicated = DistributedDataParallel(Model())
    found = [kinds_of(replicated, "module.")]
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    for is_parallel in (False, True):
        model = Model()
        if is_parallel:
            parallelize_module(model, mesh["tp"], {"to_two": ColwiseParallel()})
        for module in (model.words, model.to_two, model.filters, model.norm, model):
            fully_shard(module, mesh=mesh["dp" if is_parallel else "tp"])
        assert type(model.filters).__name__ == "FSDPConv1d"
        assert all(isinstance(p, DTensor) for p in model.parameters())
        found.append(kinds_of(model))
    return found


def test_wrapped_models_have_the_kinds_of_the_model_itself() -> None:
    assert kinds_of(Model()) == KINDS
    for found in run_ranks(wrapped_kinds, 2):
        assert found == [KINDS] * 3
