"""The fine-tuning script of transformers and FSDP2 whose optimizer is ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.integrations
transformers = pytest.importorskip("transformers")

import fsdp2_finetune as example

from lather.optim import parameters_by_kind
from test_examples import run_on_ranks


def losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]


def test_one_line_makes_it_muon_and_ranks_change_no_number(tmp_path: Path) -> None:
    name = "integrations/fsdp2_finetune.py"
    base = tmp_path / "base"
    example.make_model("", torch.device("cpu")).save_pretrained(base)
    alone, two = (
        losses(run_on_ranks(name, ranks, base, tmp_path / f"tuned-{ranks}")) for ranks in (1, 2)
    )
    assert len(alone) == 5
    assert alone[-1] < 0.8 * alone[0]
    assert two == pytest.approx(alone, rel=1e-3)
    first, second = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"tuned-{ranks}").state_dict()
        for ranks in (1, 2)
    )
    assert first.keys() == second.keys()
    worst = max(float((first[key] - second[key]).abs().max()) for key in first)
    assert worst < 1e-2 * max(float(x.abs().max()) for x in first.values())


def test_its_experts_are_found() -> None:
    kinds = parameters_by_kind(example.make_model("", torch.device("cpu")))
    assert {name.rpartition(".")[2] for name, _ in kinds["experts"]} == {
        "gate_up_proj",
        "down_proj",
    }
