"""docs/evaluation.md: its Python runs, and the options that it names exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from lather.commands.eval import EvalArguments
from lather.commands.generate import GenerateArguments

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def test_the_code_runs() -> None:
    *_, block = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    sizes = (
        "hidden_size=16, num_hidden_layers=2, vocab_size=50, "
        "intermediate_size=16, num_experts=4, num_experts_per_tok=2"
    )
    block = block.replace(".config()", f".config({sizes})")
    names: dict[str, object] = {}
    exec(compile(block, PAGE.name, "exec"), names)
    assert [len(tokens) for tokens in names["rows"].tokens] == [23, 22]  # type: ignore[attr-defined]
    assert names["logits"].shape == (1, 2, 50)  # type: ignore[attr-defined]


def test_options_of_the_page_are_there() -> None:
    there = {
        field.name.replace("_", "-")
        for arguments in (EvalArguments, GenerateArguments)
        for field in fields(arguments)
    }
    named = set(re.findall(r"--([a-z][a-z-]*)", PAGE.read_text()))
    assert named - there == set()
    assert there - named <= {"run", "data"}
