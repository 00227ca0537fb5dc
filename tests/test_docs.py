"""The pages of docs/ and the README are right: links lead somewhere, tables are those of the code,
and what pages show works."""

import ast
import importlib
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
from lather import formats, optim
from lather.cli import COMMANDS
from lather.optim import MatrixOptimizer, Rule, state_bytes
from lather.optim.options import options_of
from lather.optim.rules import RULES

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


# --- tables ---------------------------------------------------------------------------------------


def test_the_lists_of_the_reference_are_those_of_the_code() -> None:
    assert reference_tables.main(["--check"]) == 0, "run python docs/reference_tables.py"
    page = (DOCS / "commands.md").read_text()
    assert all(f"\n## lather {command}\n" in page for command in COMMANDS)


@pytest.mark.parametrize("rule", RULES.values())
def test_help_explains_every_option(rule: type[Rule]) -> None:
    text = getattr(optim, rule.__name__.removesuffix("Rule")).__doc__
    for name in options_of(rule):
        assert re.search(rf"^ *{name}: \S", text, re.MULTILINE), name


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


def test_the_table_of_formats_is_that_of_the_code() -> None:
    ((_, *rows),) = tables_of(section(DOCS / "checkpoints.md", "Formats"))
    forms = [form for form in vars(formats).values() if isinstance(form, formats.Format)]
    assert [row[0] for row in rows] == [form.noun for form in forms]
    for (_, number, _, readers), form in zip(rows, forms, strict=True):
        assert number == str(form.number)
        named = dict(re.findall(r"(?:^|; )(\d+)[^:;]*: commit (\w+)", readers))
        assert named == {str(old): commit for old, commit in form.readers.items()}


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
    assert rows[0][2] == "state, bytes per weight: fp32, bf16, int8"
    for row in rows[1:]:
        for name in re.findall(r"`(\w+)`", row[0]):
            shape = {"StackedSOAP": (128, 768, 2048), "EmbeddingSOAP": (32_000, 2048)}.get(
                name, (768, 2048)
            )
            sizes = [
                state_bytes(shape, getattr(optim, name), state_dtype=dtype)
                for dtype in (torch.float32, torch.bfloat16, torch.int8)
            ]
            assert [float(cell) for cell in row[2].split(",")] == pytest.approx(
                [size / math.prod(shape) for size in sizes], abs=0.051
            )


def test_the_table_of_extras_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ((_, *rows),) = tables_of(section(DOCS / "install.md", "Extras"))
    assert sorted(name for name, *_ in rows) == sorted(f"`{extra}`" for extra in extras)


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
    gradients: dict[Any, Any] = {}

    class Elsewhere(lion):  # type: ignore[misc, valid-type]
        def update(self, g: Any, s: Any, t: int) -> Any:
            before, gradients[g.shape] = gradients.get(g.shape, 0.0), g.clone()
            return super().update(g + before, s, t)

    class InCompany(lion):  # type: ignore[misc, valid-type]
        elementwise = False

        def update(self, g: Any, s: Any, t: int) -> Any:
            return super().update(g - g.mean(0, keepdim=True), s, t)

    for wrong in (Elsewhere, InCompany):
        with pytest.raises(AssertionError):
            check(wrong(lr=1e-2))


@pytest.mark.usefixtures("rules")
def test_the_pages_check_finds_entries_of_the_wrong_kind() -> None:
    check = importlib.import_module("check_rule").check
    shampoo = importlib.import_module("shampoo").ShampooRule

    class Lopsided(shampoo):  # type: ignore[misc, valid-type]
        def statistics(self, g: Any, s: Any, t: int) -> None:
            s["factor_0"].lerp_(g @ (g.mT + 1), 0.1)

    class Impatient(shampoo):  # type: ignore[misc, valid-type]
        def update(self, g: Any, s: Any, t: int) -> Any:
            s["root_0"].mul_(0.9)
            return super().update(g, s, t)

    for wrong, message in ((Lopsided, "is not symmetric"), (Impatient, "changes root_0")):
        with pytest.raises(AssertionError, match=message):
            check(wrong(lr=1e-2))


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("name", ["lion:LionRule", "shampoo:ShampooRule"])
@pytest.mark.parametrize("options", [{}, {"state_dtype": {"moments": torch.bfloat16}}], ids=str)
def test_rules_of_the_page_descend_with_state_of_the_predicted_size(
    name: str, options: dict[str, Any]
) -> None:
    module, _, attribute = name.partition(":")
    rule = getattr(importlib.import_module(module), attribute)(lr=2e-2, **options)
    assert isinstance(rule, Rule)
    check = importlib.import_module("check_rule")
    check.check(rule)
    torch.manual_seed(1)
    target = [torch.randn(shape) for shape in check.SHAPES[:3]]
    params = [torch.nn.Parameter(torch.randn(x.shape)) for x in target]
    optimizer = MatrixOptimizer(params, rule)
    losses = []
    for _ in range(60):
        loss = sum((p - x).square().sum() for p, x in zip(params, target, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for p in params:
        num_bytes = sum(x.nbytes for x in optimizer.state[p].values())
        assert num_bytes == state_bytes(tuple(p.shape), type(rule), **options)
