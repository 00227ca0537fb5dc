"""`train.weight_dtype`: runs with weights in bf16 and remainders are runs with weights in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from narrow_runs import (
    BF16,
    NARROW,
    RUNS,
    SAVED,
    WIDE,
    losses,
    on_meshes,
    rounding_away,
    same_weights,
    train_both,
    weights,
)
from ranks import run_ranks
from tiny_training import make_config, start, write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow")
    write_texts(folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_fp32_weights(folder: Path, name: str) -> None:
    assert train_both(folder, name) == []


def test_a_run_on_a_mesh_is_that_of_fp32_weights(folder: Path) -> None:
    assert run_ranks(on_meshes, 4, folder) == [[]] * 4


def test_a_run_goes_on_with_weights_of_the_other_dtype(folder: Path) -> None:
    """A checkpoint has the same weights in both forms, to the bit, and so has the run that goes on;
    the dtype may change, and change back."""
    soap = BF16, RUNS["soap"], SAVED, {"optim": {"schedule": "constant"}}
    start(make_config(folder, "whole", *soap, NARROW, {"train": {"steps": 6}}))
    for steps, dtype in ((2, NARROW), (4, WIDE), (6, NARROW)):
        with rounding_away():
            start(make_config(folder, "changed", *soap, dtype, {"train": {"steps": steps}}))
    assert losses(folder / "changed") == losses(folder / "whole")
    assert same_weights(weights(folder / "changed"), weights(folder / "whole")) == []


def test_initial_weights_are_exact(folder: Path) -> None:
    """A new run with bf16 weights begins with exactly the weights of a run in fp32."""
    start(make_config(folder, "first", BF16, WIDE))
    init = {"init_from": str(folder / "first"), "train": {"steps": 0}}
    start(
        make_config(
            folder, "next", BF16, NARROW, init, {"train": {"steps": 1}, "optim": {"lr": 0.0}}
        )
    )
    assert same_weights(weights(folder / "first"), weights(folder / "next")) == []


def test_frozen_weights_are_rounded(folder: Path) -> None:
    """Frozen weights in bf16 have no remainder: they are what products read."""
    lora = {"lora": {"rank": 2}, "model": {"tie_word_embeddings": False}}
    for name, dtype in (("lora fp32", WIDE), ("lora bf16", NARROW)):
        start(make_config(folder, name, BF16, lora, dtype))
    assert losses(folder / "lora fp32") == losses(folder / "lora bf16")
    wide, narrow = (weights(folder / name) for name in ("lora fp32", "lora bf16"))
    frozen = {name for name in wide if "lora" not in name}
    assert all(torch.equal(wide[n], narrow[n]) for n in wide.keys() - frozen)
    assert all(
        torch.equal(narrow[n], wide[n]) or torch.equal(narrow[n], wide[n].bfloat16().float())
        for n in frozen
    )
