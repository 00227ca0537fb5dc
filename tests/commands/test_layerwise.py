"""`--layerwise always`: the bits of the model in memory, for all weights of a run and both dtypes,
for runs with adapters and with loss-free balancing; and when `auto` chooses it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lather.cli import main
from lather.commands import generate
from lather.generation.text import continue_texts
from lather.train import trained_model
from tiny_run import write_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bf16 with averaged weights, loss-free balancing and two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--train.average-timescale", "0.2", "--moe.bias-update-rate", "0.1"]
    options += ["--train.precision", "bf16", "--log.sample-tokens", "0"]
    config = str(write_config(folder, steps=8))
    assert main(["train", config, "--run-dir", str(folder / "run"), *options]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def adapted(run: Path) -> Path:
    """A run with adapters that starts from that run."""
    folder = run.parent / "adapted"
    options = [
        "--train.precision",
        "bf16",
        "--lora.rank",
        "2",
        "--lora.targets",
        "attention",
        "experts",
    ]
    config = str(write_config(run.parent, steps=8))
    start = ["--init-from", str(run), "--log.sample-tokens", "0", "--optim.lr", "1e-2"]
    assert main(["train", config, "--run-dir", str(folder), *start, *options]) == 0
    return folder


def evaluate(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["eval", str(run), "--json", "--batch-size", "3", *options]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return {key: value for key, value in result.items() if key != "time"}


@pytest.mark.parametrize("name", ["run", "adapted"])
def test_all_weights_give_the_bits_of_the_model_in_memory(
    name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    folder: Path = request.getfixturevalue(name)
    found = []
    for options in (
        [],
        ["--weights", "last:2"],
        ["--dtype", "bf16"],
        ["--dtype", "fp32"],
        *([["--weights", "average"]] if name == "run" else []),
    ):
        in_memory = evaluate(capsys, folder, *options, "--layerwise", "never")
        assert evaluate(capsys, folder, *options, "--layerwise", "always") == in_memory
        assert in_memory["dtype"] == ("".join(options[1:]) if "--dtype" in options else None)
        found.append(str(in_memory["sets"]))
    assert len(set(found)) == len(found), "each option changes the results"


def test_auto_reads_from_disk_what_does_not_fit(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", str(run), "--prompt", "def", "--tokens", "3"]
    num_bytes = 4 * 30_000
    for free, is_noted in ((2**40, False), (num_bytes // 4, True), (0, False)):
        monkeypatch.setattr(trained_model, "free_memory", lambda device, free=free: free)
        capsys.readouterr()
        assert main(words) == 0
        assert ("a block's are read when it runs (--layerwise)" in capsys.readouterr().err) == (
            is_noted
        )


def test_texts_are_made_in_the_precision_of_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[bool] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        found.append(torch.is_autocast_enabled("cpu"))
        return continue_texts(*arguments, **options)

    monkeypatch.setattr(generate, "continue_texts", noted)
    words = ["generate", str(run), "--tokens", "3"]
    for options in ([], ["--layerwise", "always"], ["--dtype", "bf16"], ["--dtype", "fp32"]):
        assert main([*words, "--prompt", "def", *options]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main([*words, "--chat"]) == 0
    assert found == [True, True, False, False, True]
    assert not torch.is_autocast_enabled("cpu")
