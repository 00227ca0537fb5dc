"""`lather doctor` in two real ranks: what it measures, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forked import ForkedPython
from lather.memory.doctor_rates import doctor_rates


def test_two_ranks_measure_their_links_and_disk(tmp_path: Path) -> None:
    command = [
        "-m",
        "lather",
        "doctor",
        "--nproc",
        "2",
        "--device",
        "cpu",
        "--run-dir",
        "runs/new",
        "--json",
        "found.json",
    ]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "COLUMNS": "120"}
    process = ForkedPython(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    links = {(link["operation"], link["num_bytes"]): link for link in found["links"]}
    assert len(links) == 9
    assert all(
        link["is_right"] and link["backend"] == "gloo" and link["seconds"] > 0
        for link in links.values()
    )
    largest = 16 * 2**20
    assert [
        links[name, largest]["sent"] / largest
        for name in ("all-reduce", "all-to-all", "to the next rank")
    ] == [1, 0.5, 1]
    first, second = found["ranks"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["disk"]["write"] > 0
    assert second["disk"] is None
    table = doctor_rates(tmp_path / "found.json", "cpu")
    slow = min(first["rates"]["fp32"], second["rates"]["fp32"])
    assert table.kinds["fp32 GEMM"].flops == slow > 1e8
    largest_exchange = links["all-to-all", largest]
    exchange = largest_exchange["sent"] / largest_exchange["seconds"]
    assert table.kinds["exchanges"].bytes == pytest.approx(exchange)
    assert first["sees_run_dir"]
    assert second["sees_run_dir"]
    assert "nothing is wrong" in out
    assert len(re.findall(r"^ +links, gloo", out, re.MULTILINE)) == 1  # only one rank prints
    for name in ("python", "torch", "CPU", "one for all ranks", "all-to-all"):
        assert f"  {name} " in out
