"""Python blocks of the README run, the files, commands and make targets that it names exist, and
its numbers are those of the rows."""

import re
from pathlib import Path

import pytest

import result_tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
QUICKSTART, SHORT, PLAN = (
    "quickstart.jsonl",
    "convergence/short/rows.jsonl",
    "plans/qwen3-30b-a3b-16-pp2-ep8-{}.json",
)
NUMBERS = {
    "validation loss of (.*?) to": (QUICKSTART, "muon: first_loss of the quickstart"),
    "7.66 to (.*?) in": (QUICKSTART, "muon: loss of the quickstart"),
    "in (.*?) s on two": (QUICKSTART, "muon: seconds of the quickstart"),
    "rates ends at (.*?) after": (QUICKSTART, "adamw: loss of the quickstart"),
    "final loss after (.*?) of its steps": (SHORT, "qwen-8k: steps of muon to adamw"),
    r"\| Muon \| (.*?) \|": (PLAN.format("muon"), "GiB that a rank needs"),
    r"\| SOAP \| (.*?) \|": (PLAN.format("soap"), "GiB that a rank needs"),
    r"one-sided SOAP-Muon \| (.*?) \|": (PLAN.format("soap_muon"), "GiB that a rank needs"),
    r"SOAP, state in bf16 \| (.*?) \|": (
        PLAN.format("soap-smaller-bf16"),
        "GiB that a rank needs",
    ),
}
"""Texts around the numbers, the files of their rows, and what `result_tables` calls them."""


@pytest.mark.parametrize("pattern", NUMBERS)
def test_numbers_are_those_of_the_rows(pattern: str) -> None:
    file, title = NUMBERS[pattern]
    (shown,) = re.findall(pattern, README)
    assert not result_tables.wrong_number(shown, result_tables.RESULTS / file, title)


def test_python_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        names: dict[str, object] = {}
        exec(compile(block, "README.md", "exec"), names)
        assert names["loss"].item() < 0.5  # type: ignore[attr-defined]
