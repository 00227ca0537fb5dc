"""docs/adding-a-family.md: the first block prints what it says; its family trains, generates and is
exported once the changes are made."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/adding-a-family.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_parameters_are_sorted_as_the_page_says() -> None:
    printed = io.StringIO()
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        exec(compile(blocks("python")[0], "adding-a-family.md", "exec"), names)
    assert printed.getvalue() == blocks("text")[0]
    assert "optimizer" in names


def changed_package(folder: Path) -> None:
    """Copy the package into `folder`, add the example's family, and make the changes that the page
    shows."""
    shutil.copytree(ROOT / "src/lather", folder / "lather")
    folder_of_families = folder / "lather/models/families"
    shutil.copy(ROOT / "examples/deepseek_moe.py", folder_of_families)
    families = folder_of_families / "__init__.py"
    for diff in blocks("text")[1:]:
        before, after = (
            "".join(line[1:] for line in diff.splitlines(True) if line[0] in f" {sign}")
            for sign in "-+"
        )
        source = families.read_text()
        assert source.count(before) == 1, diff
        families.write_text(source.replace(before, after))


COMMANDS = """
import json, sys, torch
from lather.cli import main
torch.set_num_threads(1)
short = "--train.steps 3 --train.validation-sequences 2 --log.sample-tokens 0".split()
short.append("--log.no-picture")
for line in sys.stdin.read().splitlines():
    command, *arguments = line.replace('"', "").split()
    assert command == "lather"
    assert main(arguments + (short if arguments[0] == "train" else [])) == 0, line
assert main(["import", "my-moe-folder", "runs/back"]) == 0
exported = json.load(open("my-moe-folder/config.json"))
assert (exported["architectures"], exported["model_type"]) == (["DeepseekForCausalLM"], "deepseek")
"""


def test_the_family_of_the_page_trains_generates_and_comes_back_from_its_export(
    tmp_path: Path,
) -> None:
    changed_package(tmp_path / "changed")
    (tmp_path / "my-moe.toml").write_text(blocks("toml")[0])
    text = tmp_path / "my-text"
    text.mkdir()
    for name in ("one", "two"):
        (text / f"{name}.txt").write_text(f"Once upon a time there were {name} of them. " * 40)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=blocks("bash")[0],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "changed"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    metrics = (tmp_path / "runs/my-moe/metrics.jsonl").read_text()
    assert '"step": 3' in metrics
