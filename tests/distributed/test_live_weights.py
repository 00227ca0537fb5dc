"""The weights of a live engine on a mesh are the tensors that an export of the whole model has."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import Case, Pair, make_pair
from ranks import run_ranks
from torch import Tensor

from lather.checkpoint.live_weights import live_weights
from lather.errors import ExchangeError
from lather.models.adapted import MergedTensors
from lather.models.hf.model_export import _ModelTensors, save_hugging_face
from lather.models.lora import LoraConfig
from lather.safetensors_file import open_safetensors
from models.tiny import FAMILY_TABLES, tiny_family_config

CASES = [
    Case(pp=2, ep=2, dtype=torch.float32),
    Case(pp=2, ep=2, family="gpt_oss", dtype=torch.float32),
    Case(ep=2, replicas=2, family="qwen3_moe", dtype=torch.float32, lora=3),
    Case(pp=2, cp=2, length=8, changes={"tie_word_embeddings": True}, dtype=torch.float32),
    Case(experts=6, layers=2, schedule="sequential", dtype=torch.float32),
    Case(pp=2, family="deepseek_v3", changes={"num_nextn_predict_layers": 1}, dtype=torch.float32),
    Case(ep=2, family="qwen3_next", dtype=torch.float32),
]


def config_of(case: Case, **changes: Any) -> Any:
    table = FAMILY_TABLES[case.family]
    sizes = {"num_hidden_layers": case.layers, **table.mesh, **case.changes, **changes}
    if table.experts:
        sizes[table.experts] = case.experts
    model = tiny_family_config(case.family, **sizes)
    return SimpleNamespace(model=model, lora=LoraConfig(case.lora))


def exported(pair: Pair, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that the export of the whole model writes."""
    config = config_of(pair.case)
    tensors = MergedTensors(_ModelTensors(copy.deepcopy(pair.plain)), config.lora.scale)
    with torch.no_grad():
        save_hugging_face(tensors, config.model, folder, dtype=dtype)
    files = open_safetensors(folder / "model.safetensors")
    return {name: files.read(name) for name in files.tensors}


def wrong(rank: int, world_size: int, folder: Path) -> list[str]:
    """Return the names of the tensors that differ on this rank."""
    found = []
    for number, case in enumerate(CASES):
        pair = make_pair(case)
        config = config_of(case)
        for dtype in (torch.float32, torch.bfloat16):
            streamed = dict(live_weights(pair.engine, config, dtype))
            expected = exported(pair, folder / f"{number}-{rank}-{dtype}", dtype)
            if streamed.keys() != expected.keys():
                found.append(f"{case.name()}: {streamed.keys() ^ expected.keys()}")
            found += [
                f"{case.name()}: {name}"
                for name, value in expected.items()
                if name in streamed and not torch.equal(value, streamed[name])
            ]
        # nothing was changed, and nothing is left half done
        assert pair.largest_error("value") == 0
        dist.barrier()
    return found


def test_every_rank_of_a_mesh_gets_the_tensors_of_an_export(tmp_path: Path) -> None:
    assert run_ranks(wrong, 4, tmp_path) == [[]] * 4


def test_one_rank_gets_the_tensors_of_an_export_and_may_change_them(tmp_path: Path) -> None:
    pair = make_pair(Case(schedule="sequential", dtype=torch.float32, lora=2))
    streamed = dict(live_weights(pair.engine, config_of(pair.case)))
    expected = exported(pair, tmp_path / "model", torch.float32)
    assert streamed.keys() == expected.keys()
    for name, value in streamed.items():
        assert torch.equal(value, expected[name])
        value.zero_()
    assert pair.largest_error("value") == 0


def test_another_model_is_refused() -> None:
    pair = make_pair(Case(schedule="sequential", dtype=torch.float32))
    with pytest.raises(ExchangeError, match="does not match the configuration"):
        next(live_weights(pair.engine, config_of(pair.case, vocab_size=41)))
