"""Runs that earlier code began, resumed by this one: the end is the one that the earlier code's uninterrupted run came to."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored import stored_tensors

from lather.cli import main
from machine import machine
from train.fixtures.make import FOLDER, LAST, PLACEHOLDER, RUNS, SAVED, digest, write_corpus


def copy_run(name: str, working_folder: Path) -> Path:
    """The run as it would be if it had been trained here, and the text that it was trained on."""
    write_corpus(working_folder)
    run_dir = working_folder / "run"
    shutil.copytree(FOLDER / name / "run", run_dir)
    config = run_dir / "config.toml"
    config.write_text(config.read_text("utf-8").replace(PLACEHOLDER, str(working_folder)), "utf-8")
    return run_dir


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_goes_on(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the bit where it was trained, weights and optimizer state; elsewhere products are rounded differently."""
    run_dir = copy_run(name, tmp_path)
    before = {file: file.read_bytes() for file in (run_dir / "checkpoints" / SAVED).iterdir()}
    with torch.random.fork_rng():
        status = main(["train", str(run_dir / "config.toml")])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert f"resuming {run_dir / 'checkpoints' / SAVED}" in out
    assert {file: file.read_bytes() for file in before} == before
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))

    found = stored_tensors(run_dir / "checkpoints" / LAST)
    digests = json.loads((FOLDER / name / "digests.json").read_text())
    assert found.keys() == digests.keys()
    if machine() == json.loads((FOLDER / "machine.json").read_text()):
        assert [key for key, x in found.items() if digest(x) != digests[key]] == []
    else:
        weights = load_file(FOLDER / name / "weights.safetensors")
        torch.testing.assert_close({key: found[key] for key in weights}, weights, rtol=0, atol=1e-5)
