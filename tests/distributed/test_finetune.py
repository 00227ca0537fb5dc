"""Fine-tuning on meshes: with adapters and frozen parameters the rows and weights are those of one
process, from the same Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from stored import stored_tensors
from tiny_training import Silent, make_config, start, write_texts

from lather.config.config import Config
from lather.data.documents import train_tokenizer
from lather.data.recipe import END_OF_TEXT
from lather.errors import CheckpointError
from lather.files import read_rows
from lather.models.families import build_model
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.models.hf.model_export import save_hugging_face
from lather.train import loop
from lather.train.loop import train
from tiny_model import TINY
from tiny_run import TIME_FIELDS

pytestmark = pytest.mark.timeout(600)  # a free machine needs a tenth of this

LORA: dict[str, Any] = {
    "lora": {"rank": 4, "targets": ["attention", "experts", "shared_experts", "dense"]}
}
RUNS: dict[str, dict[str, Any]] = {
    "adapters": {
        **LORA,
        "train": {"trainable": ["*.input_layernorm.weight"], "frozen": ["layers.3.*"]},
    },
    "soap": {**LORA, "optim": {"name": "soap", "precondition_frequency": 2}},
    "one layer": {"train": {"trainable": ["layers.0.*"]}},
}
"""Runs that one process and meshes do. With two pipeline ranks the second one has layers 1 and 2,
so that it trains nothing in "one layer"."""
MESHES: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "pp2 adapters": ("adapters", {"pp": 2, "poison": True}),
        "ep2 adapters of the host": ("adapters", {"ep": 2, "poison": True}),
        "pp2 one layer": ("one layer", {"pp": 2}),
        "dp2 soap": ("soap", {}),
    },
    4: {
        "pp2 ep2 adapters": ("adapters", {"pp": 2, "ep": 2, "poison": True}),
        "pp2 dp2 one layer": ("one layer", {"pp": 2}),
        "ep2 dp2 adapters of the host": ("adapters", {"ep": 2}),
    },
}


def config_of(folder: Path, run_dir: str, *changes: dict[str, Any]) -> Config:
    published = folder / "published"
    return make_config(
        folder,
        run_dir,
        {
            "init_from": str(published),
            "data": {"tokenizer": str(published / "tokenizer.json")},
            "optim": {"warmup_steps": 1, "rest": {"lr_factor": 1.0}},
            "train": {"steps": 3, "precision": "fp64"},
        },
        *changes,
    )


def from_host(name: str) -> dict[str, Any]:
    """Return what lets the frozen weights of a run with this name come from the host."""
    return {"train": {"offload_frozen": True}} if "host" in name else {}


def trainings(rank: int, world_size: int, folder: Path) -> list[int]:
    """Do all runs of this number of ranks; returns the steps at which they ended."""
    steps = []
    for name, (run, parallel) in MESHES[world_size].items():
        changes = {"parallel": parallel, **from_host(name)}
        steps.append(start(config_of(folder, name, RUNS[run], changes)).step)
    if world_size == 2:
        steps.append(
            start(
                config_of(folder, "moved", RUNS["adapters"], {"parallel": {"pp": 2}}),
                stop_after=1,
            ).step
        )
        steps.append(
            start(config_of(folder, "moved", RUNS["adapters"], {"parallel": {"ep": 2}})).step
        )
    return steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetuning")
    write_texts(folder)
    config = DeepseekV2Config(**TINY)
    save_hugging_face(
        build_model(config, torch.Generator().manual_seed(7)), config, folder / "published"
    )
    train_tokenizer(iter(["the quick brown fox\n"] * 9), TINY["vocab_size"], END_OF_TEXT).save(
        str(folder / "published/tokenizer.json")
    )
    for name, changes in RUNS.items():
        assert train(config_of(folder, name, changes), Silent()).finished
    return folder


def assert_same_run(run_dir: Path, expected: Path, rtol: float) -> None:
    rows, wanted = (read_rows(path / "metrics.jsonl") for path in (run_dir, expected))
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        for key in row.keys() - TIME_FIELDS:
            value = other[key]
            if isinstance(value, int | float):
                value = pytest.approx(value, rel=rtol)
            assert row[key] == value, (run_dir.name, row["step"], key)
    found, tensors = (
        stored_tensors(path / "checkpoints/step-00000003") for path in (run_dir, expected)
    )
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        torch.testing.assert_close(
            found[name],
            x,
            rtol=rtol,
            atol=rtol,
            msg=lambda text, name=name: f"{run_dir.name} {name}: {text}",
        )


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_a_mesh_fine_tunes_as_one_process_does(world_size: int, folder: Path) -> None:
    """SOAP's state is in fp32, hence its tolerance."""
    for steps in run_ranks(trainings, world_size, folder, timeout=500):
        assert steps == [3] * len(MESHES[world_size]) + [1, 3] * (world_size == 2)
    for name, (run, _) in MESHES[world_size].items():
        assert_same_run(folder / name, folder / run, 1e-5 if run == "soap" else 1e-9)
    if world_size == 2:
        assert_same_run(folder / "moved", folder / "adapters", 1e-9)


def test_frozen_weights_of_one_process_come_from_the_host(folder: Path) -> None:
    name = "adapters of the host"
    assert train(config_of(folder, name, RUNS["adapters"], from_host(name)), Silent()).finished
    assert_same_run(folder / name, folder / "adapters", 0.0)


def weights_that_one_rank_lacks(rank: int, world_size: int, folder: Path) -> str:
    """Train from a folder that rank 1's machine does not have; returns what this rank raises."""

    def lost(config: Config) -> Path:
        raise CheckpointError(f"init_from = {config.init_from!r} has no checkpoint")

    with (
        patch.object(loop, "find_weights", lost if rank == 1 else loop.find_weights),
        pytest.raises(CheckpointError) as error,
    ):
        start(config_of(folder, "lacking", {"parallel": {"pp": 2}}))
    return str(error.value)


def test_weights_that_one_rank_lacks_are_an_error_of_all_and_leave_nothing(folder: Path) -> None:
    first, second = run_ranks(weights_that_one_rank_lacks, 2, folder)
    assert first == second
    assert first.startswith("init_from = ")
    assert not (folder / "lacking").exists()


def test_only_what_is_trained_changes_and_has_state(folder: Path) -> None:
    base = dict(
        build_model(DeepseekV2Config(**TINY), torch.Generator().manual_seed(7)).named_parameters()
    )
    for run, is_trained in {
        "adapters": lambda name: (
            ("lora" in name or "input_layernorm" in name) and not name.startswith("layers.3.")
        ),
        "soap": lambda name: "lora" in name,
        "one layer": lambda name: name.startswith("layers.0."),
    }.items():
        stored = stored_tensors(folder / run / "checkpoints/step-00000003")
        names = {name for name in stored if "/" not in name}
        assert {name.rpartition("/")[0] for name in stored if "/" in name} == {
            name for name in names if is_trained(name)
        } | {
            name.rpartition(".")[0]
            for name in names
            if is_trained(name) and name.rpartition(".")[2].isdecimal()
        }
        for name in names:
            stack, _, number = name.rpartition(".")
            before = base.get(name, base[stack][int(number)] if stack in base else None)
            if before is not None:
                assert torch.equal(stored[name], before.double()) != is_trained(name), (run, name)
