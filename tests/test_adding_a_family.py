"""docs/adding-a-family.md: the first block prints what it says; a family of a module of the user's
works in every command, and a name that is wrong is one line."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lather.config.toml_file import load_config, load_run
from lather.errors import ConfigError
from lather.models import shared_fields
from lather.models.families import FAMILIES, build_model, find_family

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/adding-a-family.md").read_text()
SHORT = ["--train.steps", "3", "--train.validation-sequences", "2"]
SHORT += ["--log.sample-tokens", "0", "--log.no-picture"]
NAME = "deepseek_moe:FAMILY"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_parameters_are_sorted_as_the_page_says() -> None:
    printed = io.StringIO()
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        exec(compile(blocks("python")[0], "adding-a-family.md", "exec"), names)
    assert printed.getvalue() == blocks("text")[0]
    assert "optimizer" in names


def test_the_parts_of_the_table_are_in_its_modules() -> None:
    table = PAGE.partition("| module of `lather.models` ")[2].partition("\n\n")[0]
    found = set()
    for row in table.splitlines()[2:]:
        modules, parts = (re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:3])
        for part in parts:
            homes = [importlib.import_module(f"lather.models.{module}") for module in modules]
            assert any(
                getattr(vars(home).get(part), "__module__", "") == home.__name__ for home in homes
            ), part
            found.add(part)
    assert found > {"GatedDeltaNet"} | {name for name in vars(shared_fields) if "Fields" in name}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of a user with the example's module, the page's configuration and a text, in
    which the page's commands were run."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(ROOT / "examples/deepseek_moe.py", folder)
    (folder / "my-moe.toml").write_text(blocks("toml")[0])
    (folder / "my-text").mkdir()
    for name in ("one", "two"):
        text = f"Once upon a time there were {name} of them. " * 40
        (folder / f"my-text/{name}.txt").write_text(text)
    commands = [line.replace('"', "").split()[1:] for line in blocks("bash")[0].splitlines()]
    commands[0] += SHORT
    assert lather(commands, folder) == []
    return folder


PROGRAM = """
import json, sys, torch
from lather.cli import main
torch.set_num_threads(1)
for command in json.load(sys.stdin):
    main(command)
"""


def lather(commands: Sequence[Sequence[str]], folder: Path) -> list[str]:
    """Run commands in one process in `folder`, and return their errors."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("lather: error: ")]


def test_the_run_of_the_page_trains_and_comes_back_from_its_export(folder: Path) -> None:
    assert '"step": 3' in (folder / "runs/my-moe/metrics.jsonl").read_text()
    exported = json.loads((folder / "my-moe-folder/config.json").read_text())
    assert exported["architectures"] == ["DeepseekForCausalLM"]
    assert exported["model_type"] == "deepseek"
    for run in ("runs/my-moe", "runs/back"):
        assert f'model_type = "{NAME}"' in (folder / run / "config.toml").read_text()


def test_every_other_command_takes_the_family(folder: Path) -> None:
    """Two ranks and the workers of a plan are processes of their own."""
    from_folder = ["--init-from", "my-moe-folder", "--model.model-type", NAME]
    commands = [
        ["train", "my-moe.toml", "--nproc", "2", "--parallel.ep", "2", "--run-dir", "runs/two"],
        ["train", *from_folder, "--data.source", "my-text", "--run-dir", "runs/more"],
    ]
    commands = [
        *([*command, *SHORT] for command in commands),
        ["train", "runs/my-moe", "--train.steps", "4"],
        ["train", "my-moe.toml", "--help", "model"],
        ["plan", "my-moe.toml", "--nproc", "2", "--device", "cpu"],
        ["profile", "runs/my-moe"],
        ["eval", "runs/my-moe", "--max-sequences", "2"],
    ]
    assert lather(commands, folder) == []
    for run, steps in (("two", 3), ("more", 3), ("my-moe", 4)):
        assert f'"step": {steps}' in (folder / f"runs/{run}/metrics.jsonl").read_text()


@pytest.fixture
def _search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in an empty folder, and forget the modules of this and other temporary folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path.parent)):
            del sys.modules[name]


@pytest.mark.usefixtures("_search_path")
def test_a_run_in_another_folder_needs_the_module_there(folder: Path) -> None:
    run = Path(shutil.copytree(folder / "runs/my-moe", "moved"))
    words = r"^moved/config.toml: model.model_type = 'deepseek_moe:FAMILY' is not valid: .*"
    with pytest.raises(ConfigError, match=words + "No module named 'deepseek_moe'.* PYTHONPATH$"):
        load_run(run)
    sys.path.append(str(folder))
    assert load_run(run).model.model_type == NAME


@pytest.mark.usefixtures("_search_path")
def test_the_check_against_transformers_passes_for_a_right_module_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    source = (ROOT / "src/lather/models/families/mixtral.py").read_text()
    Path("my_mixtral.py").write_text(source)
    sys.path.append(str(Path.cwd()))
    check = compile(blocks("python")[-1], "adding-a-family.md", "exec")
    exec(check, {})
    assert capsys.readouterr().out.startswith("largest difference ")
    Path("my_mixtral.py").write_text(source.replace("normalize=True", "normalize=False"))
    del sys.modules["my_mixtral"]
    with pytest.raises(AssertionError):
        exec(check, {})


BAD = {
    "bad_import:FAMILY": ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
    "bad_syntax:FAMILY": ("def", "SyntaxError"),
    "bad_value:FAMILY": ("1 / 0", "ZeroDivisionError('division by zero')"),
    "bad_name:FAMILI": ("FAMILY = 1", "bad_name has no lather.models.family.Family of the name"),
    "bad_kind:FAMILY": ("FAMILY = 1", "bad_kind has no lather.models.family.Family of the name"),
    "bad_empty:": ("", "bad_empty has no lather.models.family.Family of the name ''"),
    ":FAMILY": ("", "Empty module name"),
}


@pytest.mark.usefixtures("_search_path")
@pytest.mark.parametrize("name", BAD)
def test_a_name_that_is_wrong_is_one_line(name: str) -> None:
    text, reason = BAD[name]
    Path(f"{name.partition(':')[0]}.py").write_text(text)
    Path("my.toml").write_text(f'[model]\nmodel_type = "{name}"\n')
    with pytest.raises(ConfigError) as raised:
        load_config(Path("my.toml"))
    message = str(raised.value)
    assert message.startswith(f"my.toml: model.model_type = '{name}' is not valid: it must be ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.usefixtures("_search_path")
def test_only_the_search_path_of_python_is_changed() -> None:
    shutil.copy(ROOT / "examples/deepseek_moe.py", "of_mine.py")
    Path("my.toml").write_text('[model]\nmodel_type = "of_mine:FAMILY"\n')
    before = dict(FAMILIES)
    config = load_config(Path("my.toml")).model
    assert dict(FAMILIES) == before
    assert find_family(config.model_type).config is type(config)
    assert build_model(config).layers
    other = type(config)(model_type="lather.models.families.gpt_oss:FAMILY")
    with pytest.raises(ConfigError, match="must be the family of a DeepseekMoeConfig"):
        build_model(other)
