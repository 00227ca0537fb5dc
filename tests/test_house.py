# ruff: noqa: E501
"""The checks of `.ci/house.py`, each on a made-up package in which one thing is wrong; and pages that list the rooms of the house."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / ".ci" / "house.py"
SPEC = importlib.util.spec_from_file_location("house", FILE)
assert SPEC is not None
assert SPEC.loader is not None
house = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(house)

GOOD = {
    "src/lather/errors.py": '"""Errors."""\n\n\nclass UserError(Exception):\n    """An error."""\n',
    "src/lather/models/moe.py": "from lather.errors import UserError\n",
    "src/lather/models/hf/__init__.py": "KEYS = 3\n",
    "src/lather/models/hf/model_export.py": "from lather.models.hf import KEYS\n",
    "src/lather/train/export.py": "from lather.models.hf import KEYS\nfrom lather.models.hf.model_export import KEYS\n",
    "src/lather/train/loop.py": "import lather.models.moe\n\nSTEPS = 3\n'''Whether or not.'''\n",
    "benchmarks/memory.py": "from lather.train import loop\n",
    "tests/test_moe.py": "import lather.train.loop\n\n\nclass UserError:\n    pass\n",
}

BAD = {
    "arrow": ({"src/lather/models/moe.py": "from lather.train.data import STEPS\n"}, ":1: models imports lather.train.data"),
    "arrow inside a function": ({"src/lather/data/a.py": "def f():\n    import lather.cli\n"}, ":2: data imports lather.cli"),
    "arrow from below all": ({"src/lather/errors.py": "import lather.optim\n"}, "src/lather/errors.py:1: errors imports lather.optim"),
    "inner module": ({"src/lather/models/hf/keys.py": "X = 1\n", "src/lather/train/b.py": "\nfrom lather.models.hf.keys import X\n"}, "src/lather/train/b.py:2: imports lather.models.hf.keys, an inner module of another room"),
    "door that nobody uses": ({"src/lather/models/hf/model_folder.py": "X = 1\n"}, "lather.models.hf.model_folder: one of DOORS"),
    "circle": ({"src/lather/data/a.py": "from lather.data import b\n", "src/lather/data/b.py": "from lather.data.a import X\n"}, "src/lather/data/a.py: a circle of imports: lather.data.a -> lather.data.b -> lather.data.a"),
    "circle through a package": ({"src/lather/data/__init__.py": "from lather.data.a import X\n", "src/lather/data/a.py": "import lather.data\n"}, "src/lather/data/__init__.py: a circle of imports: lather.data -> lather.data.a -> lather.data"),
    "circle of three, in a function and for types": ({"src/lather/data/a.py": "def f():\n    import lather.data.b\n", "src/lather/data/b.py": "if TYPE_CHECKING:\n    from lather.data.c import X\n", "src/lather/data/c.py": "from lather.data.a import f\n"}, "lather.data.a -> lather.data.b -> lather.data.c -> lather.data.a"),
    "unknown module": ({"src/lather/attic.py": ""}, "src/lather/attic: no room of the house"),
    "doubled class": ({"benchmarks/other.py": "class UserError:\n    pass\n"}, "class UserError is also defined at benchmarks/other.py:1"),
    "Of": ({"benchmarks/other.py": 'def f():\n    """Of something."""\n'}, 'benchmarks/other.py:2: a docstring that begins with "Of"'),
    "Of in tests": ({"tests/train/test_a.py": '"""Of tests."""\n'}, 'tests/train/test_a.py:1: a docstring that begins with "Of"'),
}  # fmt: skip


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_nothing_is_found_in_a_good_tree(tmp_path: Path) -> None:
    assert list(house.findings(write(tmp_path, GOOD))) == []


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_found_once(name: str, tmp_path: Path) -> None:
    files, message = BAD[name]
    (found,) = house.findings(write(tmp_path, {**GOOD, **files}))
    assert message in found


def test_rooms_that_are_named_are_there() -> None:
    package = ROOT / "src" / "lather"
    assert {*house.ROOMS, *house.FOR_ALL} == {
        path.stem
        for path in package.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }


def test_pages_list_all_rooms_in_their_order() -> None:
    """Pages leave out `__main__` and `__init__`, which every package has."""
    rooms = [room for room in house.ROOMS if room != "__main__"]
    design = (ROOT / "docs" / "design.md").read_text("utf-8")
    table = design.partition("| room | holds |\n|---|---|\n")[2].partition("\n\n")[0]
    assert [
        room for line in table.splitlines() for room in re.findall(r"`(\w+)`", line.split("|")[1])
    ] == rooms
    (for_all,) = re.findall(
        r"^Modules beside the rooms serve all of them: (.*)\.$", design, re.MULTILINE
    )
    assert {*re.findall(r"`(\w+)`", for_all), "__init__"} == {*house.FOR_ALL}
    assert f"`{', '.join(rooms)}`" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_lines_of_code_are_neither_empty_nor_comments_nor_docstrings() -> None:
    text = '"""Head."""\n\n# why\nX = (\n    1,  # one\n)\n"""Said\nof X."""\n\n\ndef f():\n    """Do."""\n    return "a\\n" """b\n\nc"""\n'
    assert house.code_lines(text) == 3 + 1 + 3
