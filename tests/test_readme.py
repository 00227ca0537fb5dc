"""Python blocks of the README run, and the files, commands and make targets that it names exist."""

import re
from pathlib import Path

from lather.cli import USAGE

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        names: dict[str, object] = {}
        exec(compile(block, "README.md", "exec"), names)
        assert names["loss"].item() < 0.5  # type: ignore[attr-defined]


def test_files_and_commands_that_it_names_exist() -> None:
    for path in re.findall(r"\]\(([^)#\s]+)", README) + re.findall(r"configs/\S+\.toml", README):
        assert (ROOT / path).exists(), path
    for command in re.findall(r"^lather (\w+)", README, re.MULTILINE):
        assert f"  {command} " in USAGE


def test_make_targets_that_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
