"""`lather bench optimizer` as a user meets it: rows, table, and one clear line for
everything that can be put right."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contestants, optimizer
from benchmarks.check import CheckError
from benchmarks.optimizer_report import RunRange, by_case, summary, table_rows
from benchmarks.report import RowFile
from lather.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two runs with torch as the only peer."""
    out = tmp_path_factory.mktemp("bench")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    command = [
        "bench",
        "optimizer",
        "--sets",
        "tiny",
        "tiny_3d",
        "--frequencies",
        "1",
        "3",
        "--rounds",
        "5",
        "--peers",
        "torch",
    ]
    assert main([*command, "--runs", "2", "--out", str(out)]) == 0
    torch.set_num_threads(before)
    return out


@pytest.fixture
def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "optimizer-cpu.jsonl").read_text().splitlines()]


def with_peer(rows: list[dict[str, Any]], times: float) -> list[dict[str, Any]]:
    """SOAP's rows, and rows of a peer that takes `times` as long."""
    rows = [row for row in rows if row["config"]["rule"] == "soap"]
    peers = []
    for row in rows:
        ms = {key: times * value for key, value in row["step_ms"].items()}
        round_ms = [times * value for value in row["round_ms"]]
        peers.append(
            {
                **row,
                "config": {**row["config"], "contestant": "heavyball"},
                "step_ms": ms,
                "round_ms": round_ms,
            }
        )
    return [*rows, *peers]


def test_a_row_has_everything(rows: list[dict[str, Any]]) -> None:
    soap = [
        (name, frequency, "lather", "soap") for name in ("tiny", "tiny_3d") for frequency in (1, 3)
    ]
    rest = [
        (name, 1, who, rule)
        for rule in ("muon", "adamw")
        for name in ("tiny", "tiny_3d")
        for who in ("lather", "torch")
    ]
    keys = ("set", "frequency", "contestant", "rule")
    assert [tuple(row["config"][key] for key in keys) for row in rows] == 2 * [*soap, *rest]
    assert [row["run"] for row in rows] == [1] * 12 + [2] * 12
    for row in rows:
        assert row.keys() >= {
            "commit",
            "dirty",
            "baseline",
            "check",
        }
        assert row["hardware"].keys() == {"cpu", "cores", "threads", "gpu"}
        assert row["versions"].keys() == {"python", "torch", "lather"}
        assert row["config"]["options"]["lr"] == 1e-3
        if row["config"]["contestant"] == "torch":
            assert row["times_of_lather"] > 0
            continue
        assert row["config"]["matrix_layout"] == (
            "per_expert" if row["config"]["set"] == "tiny_3d" else "tensor"
        )
        assert len(row["round_ms"]) == row["config"]["rounds"] == 5
        assert 0 < row["step_ms"]["p20"] <= row["step_ms"]["median"] <= row["step_ms"]["p80"]
        assert 0 < row["state_bytes"] <= row["state_bound_bytes"]
        assert row["peak_temporary_bytes"] > 0
        assert row["check"]["error_of_lather"] < 1e-3
        assert row["times_of_lather"] == 1


def test_only_finished_files_are_left(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["optimizer-cpu.jsonl"]


def test_with_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers = contestants.PEERS["soap"]
    for peer in peers:
        pytest.importorskip(peer)
    command = [
        "bench",
        "optimizer",
        "--rules",
        "soap",
        "--sets",
        "tiny",
        "--frequencies",
        "2",
        "--rounds",
        "5",
    ]
    assert main([*command, "--out", str(tmp_path)]) == 0
    rows = [
        json.loads(line) for line in (tmp_path / "optimizer-cpu.jsonl").read_text().splitlines()
    ]
    assert [row["config"]["contestant"] for row in rows] == ["lather", *peers]
    assert rows[0]["baseline"] == list(peers)
    assert rows[0]["versions"]["heavyball"]
    out = capsys.readouterr().out
    for peer in peers:
        assert f"soap against {peer}: takes" in out


def test_without_the_extra_one_line_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(contestants.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "optimizer", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'lather[bench]'" in line
    assert "--peers none" in line
    assert not list(tmp_path.iterdir())


def test_a_case_that_fails_its_check_has_no_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_for_frequency_2(case: contestants.OptimizerCase, *_: Any) -> dict[str, Any]:
        if case.frequency == 2:
            raise CheckError("no good")
        return {}

    monkeypatch.setattr(optimizer, "check_case", fail_for_frequency_2)
    command = [
        "bench",
        "optimizer",
        "--rules",
        "soap",
        "--sets",
        "tiny",
        "--rounds",
        "5",
        "--peers",
        "none",
        "--out",
        str(tmp_path),
    ]
    assert main([*command, "--frequencies", "2"]) == 1
    assert not list(tmp_path.iterdir())
    assert main([*command, "--frequencies", "1", "2"]) == 1
    assert "soap tiny f=2: check failed, not measured: no good" in capsys.readouterr().out
    (row,) = [
        json.loads(line) for line in (tmp_path / "optimizer-cpu.jsonl").read_text().splitlines()
    ]
    assert row["config"]["frequency"] == 1


def test_rows_replace_the_last_runs_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "optimizer-cpu.jsonl"
    path.write_text("old\n")
    file = RowFile(path)
    file.write([{"a": 1}])
    assert path.read_text() == "old\n"
    file.finish()
    assert path.read_text() == '{"a": 1}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_summary_holds_each_target(rows: list[dict[str, Any]]) -> None:
    lines = summary(with_peer(rows, times=1.6))
    assert lines[0].startswith("soap against heavyball: takes 1.60 times as long (geometric mean")
    assert lines[-1].startswith("state: at most")


def test_several_runs_are_shown_as_a_range(rows: list[dict[str, Any]]) -> None:
    one = [row for row in with_peer(rows, times=2.0) if row["run"] == 1]
    slower = [{**row, "run": 2} for row in with_peer(rows, times=3.0) if row["run"] == 1]
    assert summary(one + slower)[0].startswith(
        "soap against heavyball: takes 2.50 (2.00 - 3.00) times as long"
    )
    lines = table_rows(by_case(one + slower))
    (line,) = [line for line in lines if line[:2] == ["soap tiny f=1", "heavyball"]]
    assert line[3] == "2.50 (2.00 - 3.00)"
    assert RunRange.of([1200.0]).text(1) == "1,200.0"
