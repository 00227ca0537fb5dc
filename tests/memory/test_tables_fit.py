"""Tables of `lather plan` and `lather profile` on consoles of any width: no line is wider, and
every word and number is there, whole."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from planned_configs import config_of
from rich.console import Console

from lather.console import LONG_WORD, WIDE
from lather.memory import plan_report, profile_report
from lather.memory.ledger import MemoryTimeline
from lather.memory.plan import MemoryPlan, plan
from lather.memory.profile import SEGMENTS, KeptTensor, Profile
from lather.memory.work import Work
from lather.memory.workers import Assumed
from lather.models.families import FAMILIES

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def planned() -> MemoryPlan:
    return plan(config_of("soap", precision="bf16"), 1, Assumed())


def profile(scale: float = 1.0) -> Profile:
    """A profile with storages of every segment, of many layers and with long names."""
    tensors = [
        KeptTensor(
            layer=f"layers.{layer}",
            segment=segment,
            made_by="_scaled_dot_product_flash_attention_for_cpu",
            shape=(1_234_567, 2048 + layer, 128),
            dtype="float32",
            bytes=int(12_345 * MIB * scale),
            is_weight=False,
        )
        for layer in range(3)
        for segment in SEGMENTS
    ]
    return Profile(tuple(tensors), 1024)


def advice() -> Any:
    """Settings with many changes, as a ladder makes them."""
    sizes = [123_456 * GIB, 1234 * GIB, 567 * GIB, 89 * GIB]
    changes = {
        **{
            "parallel.pp": "16",
            "parallel.ep": "8",
            "train.micro_batch_size": "1",
            "optim.name": "stacked_soap",
        },
        **{"train.recompute": "attention experts shared_experts", "optim.state_dtype": "bfloat16"},
    }
    planned = SimpleNamespace(
        needed=79 * GIB,
        work=Work(3e15, *sizes),
        bubble=lambda: 0.1234,
        assumed=Assumed("gpu"),
    )
    setting = SimpleNamespace(changes=changes, plan=planned)
    settings = [setting] * 3
    return SimpleNamespace(
        memory=80 * GIB, fitting=settings, tried=settings, without_pipeline=setting
    )


def profiles() -> dict[str, Profile]:
    return {"reference": profile(1.5), "saved": profile(), "recompute": profile(0.123)}


Show = Callable[[Console, MemoryPlan], None]
SHOWN: dict[str, Show] = {
    "plan": lambda console, planned: plan_report.show(planned, 80 * GIB, console),
    "advice": lambda console, _: plan_report.show_advice(advice(), console),
    "tensors": lambda console, _: profile_report.print_tensors(profile(), console),
    "totals": lambda console, _: profile_report.print_totals(profile(), console),
    "comparison": lambda console, _: profile_report.print_comparison(profiles(), console),
}


def printed(show: Show, planned: MemoryPlan, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    show(console, planned)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_dense_model_has_feed_forward_layers_and_no_experts(
    planned: MemoryPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryTimeline, "segments_at", lambda *_: {"experts": GIB})
    dense = FAMILIES["qwen3"].config()
    of_dense = replace(planned, config=replace(planned.config, model=dense))
    (moe, *_), (line, *_) = plan_report.remarks(planned, None), plan_report.remarks(of_dense, None)
    assert " experts " in moe
    assert line == moe.replace(" experts ", " feed-forward ")


@pytest.mark.parametrize("name", SHOWN)
def test_a_table_is_complete_at_every_width(name: str, planned: MemoryPlan) -> None:
    words = {
        word
        for line in printed(SHOWN[name], planned, WIDE)
        for word in line.split()
        if "\u2500" not in word
    }
    assert words
    for width in (60, 80, 100, 200):
        lines = printed(SHOWN[name], planned, width)
        assert max(map(len, lines)) <= width
        missing = words - {word for line in lines for word in line.split()}
        # broken between their parts
        assert all(len(word) > LONG_WORD for word in missing), (
            width,
            missing,
        )
