"""Multi-token prediction on a mesh computes what one process computes, whose `Decoder.forward` is
tested against the paper in `tests/models/test_mtp.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Case
from ranks import run_ranks
from safetensors.torch import load_file
from test_engine import ALL, check_gradients
from test_training import assert_same_bits, assert_same_rows
from tiny_training import make_config, start, write_texts

from lather.files import read_rows

TWO, ONE = {"num_nextn_predict_layers": 2}, {"num_nextn_predict_layers": 1}


def test_two_ranks_have_the_loss_and_gradients_of_one_process() -> None:
    check_gradients(
        2,
        [
            Case(pp=2, family="deepseek_v3", changes=TWO, poison=True),
            Case(ep=2, family="deepseek_v3", changes=TWO, poison=True, lopsided=True),
            Case(
                schedule="sequential",
                family="deepseek_v3",
                changes=ONE,
                recompute=ALL,
                balance_level="global_batch",
            ),
            Case(
                pp=2,
                family="deepseek_v3",
                changes={**TWO, "tie_word_embeddings": True},
                memory="recompute",
                early_weight_gradients=True,
            ),
            Case(pp=2, family="deepseek_v3", changes=ONE, frees=False, defer=False),
        ],
    )


def test_four_ranks_have_the_loss_and_gradients_of_one_process() -> None:
    check_gradients(
        4,
        [
            Case(pp=2, ep=2, family="deepseek_v3", changes=TWO, poison=True, z_loss=0.1),
            Case(pp=2, family="deepseek_v3", changes=TWO),
            Case(ep=2, replicas=2, family="deepseek_v3", changes=ONE, dtype=torch.float32),
        ],
    )


@pytest.mark.grid
def test_blocks_of_mtp_are_gathered_with_what_they_read() -> None:
    mtp = Case(family="deepseek_v3", layers=5, changes=TWO, gather="block", poison=True)
    tied = {**TWO, "tie_word_embeddings": True}
    check_gradients(
        2,
        [
            replace(mtp, schedule="sequential", small=10**5),
            replace(mtp, ep=2, lopsided=True),
            replace(mtp, schedule="sequential", changes=tied, recompute=ALL),
        ],
    )
    check_gradients(
        4,
        [
            replace(mtp, pp=2, early_weight_gradients=True),
            replace(mtp, pp=2, changes=tied),
            replace(mtp, pp=2, lora=3, small=2**30),
        ],
    )


# --- training -------------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "model": {"model_type": "deepseek_v3", "num_nextn_predict_layers": 2},
    "moe": {"bias_update_rate": 0.01, "balance_level": "sequence"},
    "data": {"packing": "documents"},
    "train": {"mtp_loss_weight": 0.5, "precision": "fp64"},
}


def stopped_and_resumed(rank: int, world_size: int, folder: Path) -> list[int]:
    """Train two steps on one mesh, and the rest on another."""
    outcomes = [
        start(make_config(folder, "moved", CHANGES, {"parallel": {"pp": 2}}), stop_after=2),
        start(make_config(folder, "moved", CHANGES, {"parallel": {"ep": 2}})),
    ]
    return [outcome.step for outcome in outcomes]


def test_a_run_goes_on_to_the_bit_and_on_another_mesh(tmp_path: Path) -> None:
    write_texts(tmp_path)
    assert start(make_config(tmp_path, "whole", CHANGES)).finished
    assert start(make_config(tmp_path, "parts", CHANGES), stop_after=2).step == 2
    assert start(make_config(tmp_path, "parts", CHANGES)).finished
    assert_same_bits(tmp_path / "parts", tmp_path / "whole", 1)
    assert run_ranks(stopped_and_resumed, 2, tmp_path) == [[2, 4]] * 2
    assert_same_rows(tmp_path / "moved", tmp_path / "whole")
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert all(row["mtp_loss"] > 1 for row in rows if "loss" in row)
    saved = load_file(tmp_path / "whole" / "checkpoints/step-00000004/rank-00000.safetensors")
    biases = [name for name in saved if "layers.5" in name and name.endswith("correction_bias")]
    assert biases
    assert all(saved[name].any() for name in biases)
