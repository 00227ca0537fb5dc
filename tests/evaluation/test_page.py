"""docs/evaluation.md: its Python runs, and the options that it names exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from lather.commands.eval import EvalArguments
from lather.commands.exchange import ExportArguments
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


def options_of(*commands: type) -> set[str]:
    return {field.name.replace("_", "-") for command in commands for field in fields(command)}


def test_options_of_the_page_are_there() -> None:
    named = set(re.findall(r"--([a-z][a-z-]*)", PAGE.read_text()))
    assert named - options_of(EvalArguments, ExportArguments, GenerateArguments) == set()
    assert options_of(EvalArguments, GenerateArguments) - named <= {"run", "data"}
