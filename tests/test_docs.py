"""The pages of docs/ and the README are right: links lead somewhere, tables are those of the code,
and what pages show works."""

import ast
import dataclasses
import importlib
import json
import math
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import reference_tables
from lather import optim
from lather.cli import COMMANDS
from lather.commands.train import read_arguments
from lather.config.config import Config
from lather.config.fields import field_names
from lather.config.optim import OptimConfig, optim_config
from lather.config.toml_file import config_from_mapping
from lather.optim import MatrixOptimizer, Rule, state_bytes
from lather.optim.options import name_of, options_of
from lather.optim.rules import RULES
from tiny_run import run, timeless_rows, write_config

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDE, REFERENCE, WRITING = (
    DOCS / "optimizers.md",
    DOCS / "optimizers-reference.md",
    DOCS / "writing-a-rule.md",
)
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md"])
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def without_code(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def section(page: Path, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


# --- links ----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_it_names_exist(page: Path) -> None:
    for script in re.findall(r"`python ([\w./]+\.py)", page.read_text()):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_with_the_name_of_a_file_is_a_part_of_it(page: Path) -> None:
    for name, block in re.findall(
        r'^```python title="([^"]*)"\n(.*?)^```$', page.read_text(), re.DOTALL | re.MULTILINE
    ):
        assert f"\n{block}" in (ROOT / name).read_text(), (name, block)


# --- tables ---------------------------------------------------------------------------------------


def test_the_lists_of_the_reference_are_those_of_the_code() -> None:
    assert reference_tables.main(["--check"]) == 0, "run python docs/reference_tables.py"


def test_the_table_of_options_has_every_option_of_every_rule_and_help_explains_it() -> None:
    (rows,) = tables_of(section(REFERENCE, "Options"))
    named = {cell: set(re.findall(r"`(\w+)`", options)) for cell, options in rows[1:]}
    assert set().union(*named.values()) == set().union(*map(options_of, RULES.values()))
    for rule in RULES.values():
        optimizer = rule.__name__.removesuffix("Rule")
        title = optimizer.replace("KLSOAP", "KL-SOAP").replace("SOAPMuon", "SOAP-Muon")
        shown = [
            options
            for cell, options in named.items()
            if cell == "all" or re.search(rf"(^|[ ,]){title}($|,)", cell)
        ]
        assert set(options_of(rule)) == set().union(*shown), rule
        text = getattr(optim, optimizer).__doc__
        for name in options_of(rule):
            assert re.search(rf"^ *{name}: \S", text, re.MULTILINE), (rule, name)


def test_every_field_and_every_command_is_in_the_reference() -> None:
    page = (DOCS / "configuration.md").read_text()
    rules_own = set(field_names(type(optim_config()))) - {
        one.name for one in dataclasses.fields(OptimConfig)
    }
    for name in field_names(Config):
        section_name, _, field = name.rpartition(".")
        if section_name.startswith("optim") and name.removeprefix("optim.") in rules_own:
            continue  # options of rules are in the optimizers' reference
        title = rf"\[{section_name}\][^\n]*" if section_name else "Top of the file"
        sections = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
        assert any(
            re.search(rf"^- `{field}` \(.+\): \S", text, re.MULTILINE) for text in sections
        ), name
    for command in COMMANDS:
        assert f"\n## lather {command}\n" in (DOCS / "commands.md").read_text()


def tables_of(text: str) -> list[list[list[str]]]:
    """Return the tables of a text as rows of cells, header first."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    return [
        [
            [cell.strip() for cell in row[1:-1].split("|")]
            for i, row in enumerate(block.splitlines())
            if i != 1
        ]
        for block in blocks
    ]


@pytest.mark.parametrize(("table", "unit"), [(0, 2**20), (1, 2**30)])
def test_the_memory_tables_are_state_bytes(table: int, unit: int) -> None:
    rows = tables_of(section(REFERENCE, "Memory"))[table]
    shapes = [tuple(int(n) for n in cell.split("x")) for cell in rows[0][2:]]
    for row in rows[1:]:
        rule = getattr(optim, row[0].strip("`"))
        given = re.match(r"`(.*?)`", row[1])
        options = eval(f"dict({given[1]})", {"torch": torch}) if given else {}
        for shape, cell in zip(shapes, row[2:], strict=True):
            size = state_bytes(shape, rule, **options)
            digits = 1 if unit == 2**20 else 2
            assert cell == f"{size / unit:.{digits}f} ({size / (4 * math.prod(shape)):.2f})", (
                row,
                shape,
            )


def test_the_guides_bytes_per_weight_are_state_bytes() -> None:
    (rows,) = tables_of(section(GUIDE, "Choose"))
    assert rows[0][2] == "state, bytes per weight: fp32, bf16"
    for row in rows[1:]:
        for name in re.findall(r"`(\w+)`", row[0]):
            shape = {"StackedSOAP": (128, 768, 2048), "EmbeddingSOAP": (32_000, 2048)}.get(
                name, (768, 2048)
            )
            sizes = [
                state_bytes(shape, getattr(optim, name), state_dtype=dtype)
                for dtype in (torch.float32, torch.bfloat16)
            ]
            assert [float(cell) for cell in row[2].split(",")] == pytest.approx(
                [size / math.prod(shape) for size in sizes], abs=0.051
            )


def test_the_table_of_extras_is_that_of_the_project() -> None:
    """The table gives only some packages of `dev`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    ((_, *rows),) = tables_of(section(DOCS / "install.md", "Extras"))
    assert sorted(name for name, *_ in rows) == sorted(f"`{extra}`" for extra in extras)
    for name, packages, _ in rows:
        needed = {re.match(r"[\w-]+", one)[0] for one in extras[name.strip("`")]}  # type: ignore[index]
        assert name == "`dev`" or {*packages.split(", ")} == needed, name


# --- the guide ------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A model with one parameter of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(10, 8)
        self.router = torch.nn.Linear(8, 3, bias=False)
        self.mlp = torch.nn.Linear(8, 8)
        self.experts = torch.nn.ParameterDict(
            {
                "up": torch.nn.Parameter(torch.randn(3, 8, 16)),
                "down": torch.nn.Parameter(torch.randn(3, 16, 8)),
            }
        )
        self.lm_head = torch.nn.Linear(8, 10, bias=False)


@pytest.mark.parametrize("number", range(len(python_blocks(GUIDE))))
def test_a_block_of_the_guide_makes_an_optimizer_that_steps_every_parameter(number: int) -> None:
    model = Model()
    names: dict[str, Any] = {"model": model}
    exec(compile(python_blocks(GUIDE)[number], GUIDE.name, "exec"), names)
    optimizer = names["optimizer"]
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters()
    }
    assert all(int(optimizer.state[p]["step"]) == 3 for p in model.parameters())
    experts = optimizer.state[model.experts["up"]]
    assert len({tuple(x.shape) for x in experts.values()}) > 1
    assert all(x.shape[0] == 3 for key, x in experts.items() if key != "step")
    assert {"exp_avg", "exp_avg_sq"} < optimizer.state[model.embed_tokens.weight].keys()


def test_the_guide_says_which_keys_are_refused_and_which_ignored() -> None:
    text = section(GUIDE, "In another trainer")
    first, second = re.findall(
        r"^- (Keys .*? misspelt is refused:)\s(.*?)\.$", text, re.DOTALL | re.MULTILINE
    )[0]
    ignored, refused = re.findall(r"`(\w+)`", first), re.findall(r"`(\w+)`", second)
    assert (len(ignored), len(refused)) == (3, 2)
    for cls in (optim.SOAP, optim.Muon, optim.AdamW):
        group = {"params": [torch.nn.Parameter(torch.ones(2, 2))]}
        assert cls([group | dict.fromkeys(ignored, 1)]).param_groups[0]["foreach"] == 1
        for key in refused:
            with pytest.raises(ValueError, match=f"unknown option '{key}'.*did you mean"):
                cls([group | {key: 0.1}])
    asking = [ast.literal_eval(keys) for keys in re.findall(r"`(\{\"[^`]*\})`", text)]
    assert len(asking) == 5
    for keys in asking:
        with pytest.raises(ValueError, match=f"^{next(iter(keys))}=.* in a parameter group "):
            optim.Muon([{"params": [torch.nn.Parameter(torch.ones(2, 2))], **keys}])


def test_the_guide_is_a_page_and_the_contract_of_a_rule_is_read_in_420_lines() -> None:
    assert len(GUIDE.read_text().splitlines()) <= 160
    contract = section(WRITING, "The contract").splitlines()
    rule = (ROOT / "src" / "lather" / "optim" / "rule.py").read_text().splitlines()
    assert len(contract) + len(rule) <= 420


# --- writing a rule -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rules() -> Iterator[Path]:
    """The folder with the rules of the page, from which Python imports."""
    folder = ROOT / "examples" / "rules"
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.mark.usefixtures("rules")
def test_blocks_of_the_page_that_are_no_files_run(capsys: pytest.CaptureFixture[str]) -> None:
    (trial, tests) = [
        block
        for block in python_blocks(WRITING)
        if "import" in block and not block.startswith('"""')
    ]
    names: dict[str, Any] = {}
    exec(compile(trial, WRITING.name, "exec"), names)
    lion = importlib.import_module("lion").LionRule
    assert capsys.readouterr().out.strip() == str(state_bytes((768, 2048), lion))
    optimizer, model = names["optimizer"], names["model"]
    assert [group["rule"] for group in optimizer.param_groups] == ["shampoo:ShampooRule", "adamw"]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert {"factor_0", "root_1"} < optimizer.state[model[0].weight].keys()
    exec(compile(tests, WRITING.name, "exec"), {})


@pytest.mark.usefixtures("rules")
def test_the_pages_check_finds_what_it_is_for() -> None:
    """The check finds state that is kept on the rule, and a matrix that depends on its batch."""
    check, lion = (
        importlib.import_module("check_rule").check,
        importlib.import_module("lion").LionRule,
    )
    kept: dict[Any, Any] = {}

    class Elsewhere(lion):  # type: ignore[misc, valid-type]
        def update(self, g: Any, s: Any, t: int) -> Any:
            before, kept[g.shape] = kept.get(g.shape, 0.0), g.clone()
            return super().update(g + before, s, t)

    class InCompany(lion):  # type: ignore[misc, valid-type]
        elementwise = False

        def update(self, g: Any, s: Any, t: int) -> Any:
            return super().update(g - g.mean(0, keepdim=True), s, t)

    for wrong in (Elsewhere, InCompany):
        with pytest.raises(AssertionError):
            check(wrong(lr=1e-2))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"state_dtype": {"moments": torch.bfloat16}},
    {"matrix_layout": "stacked"},
    {"keep_norm": True},
]


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("name", ["lion:LionRule", "shampoo:ShampooRule"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rules_of_the_page_have_what_the_engine_gives(name: str, options: dict[str, Any]) -> None:
    """The engine gives them a descent, state of the predicted size, and the documentation of
    options."""
    module, _, attribute = name.partition(":")
    rule = getattr(importlib.import_module(module), attribute)(lr=2e-2, **options)
    assert isinstance(rule, Rule)
    check = importlib.import_module("check_rule")
    check.check(
        dataclasses.replace(rule, matrix_layout="tensor") if "matrix_layout" in options else rule
    )
    target = [
        torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in check.SHAPES[:3]
    ]
    params = [
        torch.nn.Parameter(torch.randn(x.shape, generator=torch.Generator().manual_seed(2)))
        for x in target
    ]
    optimizer = MatrixOptimizer(params, rule)
    losses = []
    for _ in range(60):
        loss = torch.stack(
            [(p - x).square().sum() for p, x in zip(params, target, strict=True)]
        ).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for p in params:
        kept = sum(x.nbytes for x in optimizer.state[p].values())
        assert kept == state_bytes(tuple(p.shape), type(rule), **options)


@pytest.mark.usefixtures("rules")
def test_the_rates_of_the_rest_are_those_that_the_page_says() -> None:
    """The quickstart has a rule and a factor of its own for the rest, which the page names."""
    text = section(WRITING, "Try it")
    assert "the quickstart has `embedding_soap` there, at 3 times `optim.lr`" in text
    added = re.search(r"add `(--optim\.rest\.rule adamw [^`]*)`", text)
    assert added
    quickstart, name = (
        str(ROOT / "configs/quickstart.toml"),
        ["--optim.name", "shampoo:ShampooRule"],
    )
    own, adamw = (
        read_arguments([quickstart, *name, *more])[0].optim for more in ([], added[1].split())
    )
    without = config_from_mapping({"optim": {"name": "shampoo:ShampooRule"}}).optim
    for found, rule, rate in (
        (own, "embedding_soap", 9e-3),
        (adamw, "adamw", 3.2e-2),
        (without, "adamw", 3e-3),
    ):
        assert name_of(found.rules["rest"]) == rule
        assert found.lr_of("rest") == pytest.approx(rate)
        assert found.lr_of("matrices") == 3e-3


def test_pages_say_in_which_dtype_the_memory_modes_were_timed() -> None:
    rows = (ROOT / "benchmarks/results/memory-cpu.jsonl").read_text().splitlines()
    timed = [row for row in map(json.loads, rows) if row["benchmark"] == "time"]
    assert {row["config"]["dtype"] for row in timed} == {"float32"}
    assert "times forward and backward in fp32" in (DOCS / "models.md").read_text()
    assert (
        "both on a CPU in fp32, while the bytes are those in bf16"
        in (DOCS / "memory.md").read_text()
    )


def test_the_trainer_takes_a_rule_of_the_page(rules: Path, tmp_path: Path) -> None:
    shampoo = rules / "shampoo.py"
    (tmp_path / shampoo.name).write_text(shampoo.read_text())
    config = write_config(tmp_path, steps=6)
    config.write_text(
        re.sub(r"^precondition_frequency.*\n", "", config.read_text(), flags=re.MULTILINE)
    )
    asked = re.search(
        r"^lather train \S+ (.*) --run-dir runs/shampoo$", WRITING.read_text(), re.MULTILINE
    )
    assert asked
    status, _, errors = run(
        "train", config, *asked[1].split(), "--run-dir", "runs/shampoo", cwd=tmp_path
    )
    assert status == 0, errors
    losses = [row["loss"] for row in timeless_rows(tmp_path / "runs" / "shampoo") if "loss" in row]
    assert losses[-1] < losses[0]
    assert (
        'name = "shampoo:ShampooRule"'
        in (tmp_path / "runs" / "shampoo" / "config.toml").read_text()
    )
