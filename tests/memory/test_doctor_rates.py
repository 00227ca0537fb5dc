"""`lather plan --rates FILE` takes the rates that `lather doctor --json FILE` has measured."""

import json
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lather.cli import main
from lather.doctor.rates import measure_rates
from lather.memory.doctor_rates import doctor_rates
from lather.time_model.measured import CORE_MEASURED, MeasuredRates, table_of
from lather.time_model.rates import CORE, H100, H200

GPU = MeasuredRates("NVIDIA H200", 0, copy=4.15e12, fp32=53.4e12, tf32=350e12, bf16=690e12)
MakeFile = Callable[..., Path]


@pytest.fixture
def make_file(tmp_path: Path) -> MakeFile:
    """Make a file as `lather doctor --json` does."""

    def make(*rates: MeasuredRates, host: str = socket.gethostname(), **changes: Any) -> Path:
        versions = {"torch": changes.pop("torch", torch.__version__)}
        ranks = [{"host": host, "versions": versions, "rates": asdict(each)} for each in rates]
        file = tmp_path / "doctor.json"
        file.write_text(json.dumps({"day": "2026-11-28", "ranks": ranks, "links": [], **changes}))
        return file

    return make


def test_a_device_that_is_as_fast_as_the_table_has_the_rates_of_the_table() -> None:
    for measured, table in ((GPU, H200), (CORE_MEASURED, CORE)):
        made = table_of(measured, None, "this machine")
        for kind, rate in table.kinds.items():
            assert made.kinds[kind].bytes == pytest.approx(rate.bytes)
            if kind not in ("GEMM", "TF32 GEMM", "fp32 GEMM"):  # a core's are measured directly
                assert made.kinds[kind].flops == pytest.approx(rate.flops)
        assert (made.peak_flops, made.waits) == (table.peak_flops, table.waits)


def test_kinds_follow_the_measured_copy_and_the_product_in_their_dtype() -> None:
    fast = replace(GPU, copy=2 * 2.98e12, tf32=3 * 350e12, bf16=5 * 690e12)
    fast = replace(fast, device="NVIDIA Unknown 9")
    table = table_of(fast, 1e9, "this machine")
    assert table.name == "NVIDIA Unknown 9"
    assert table.peak_flops == 0
    times = {
        kind: (rate.bytes / H100.kinds[kind].bytes, rate.flops / H100.kinds[kind].flops)
        for kind, rate in table.kinds.items()
    }
    assert times["elementwise"][0] == pytest.approx(2)
    assert times["grouped GEMM"] == pytest.approx((2, 5))
    assert times["attention backward"] == pytest.approx((2, 5))
    assert times["symmetric TF32 products"] == pytest.approx((2, 3))
    assert times["factorizations"] == pytest.approx((2, 1))
    assert times["transfers with the host"][0] == 1
    assert table.kinds["exchanges"].bytes == 1e9
    assert table.kinds["GEMM"].source == "measured: lather doctor, this machine"
    assert table.kinds["gates"].source.startswith("assumed")
    on_cpu = table_of(replace(CORE_MEASURED, fp32=180e9, bf16=7e9), None, "this machine")
    assert on_cpu.kinds["grouped GEMM"].flops == pytest.approx(2 * CORE.kinds["grouped GEMM"].flops)
    assert on_cpu.kinds["GEMM"].flops == 7e9


def test_the_slowest_rank_counts_and_the_place_is_named(make_file: MakeFile) -> None:
    slow = replace(GPU, bf16=600e12)
    table = doctor_rates(make_file(GPU, slow), "gpu")
    assert table.kinds["GEMM"].flops == 600e12
    assert table.compared == "copies and products were measured on this machine, 2026-11-28"
    foreign = doctor_rates(make_file(GPU, host="node-7", torch="2.11.0+cu128"), "gpu")
    words = "measured on another machine, node-7, 2026-11-28, with torch 2.11.0+cu128"
    assert words in foreign.compared


def test_the_command_predicts_from_rates_that_were_just_measured(
    make_file: MakeFile, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = measure_rates(torch.device("cpu"))
    assert measured.threads == torch.get_num_threads()
    assert 1e8 < measured.copy < 1e13
    assert 1e8 < measured.fp32 < 1e14
    run = ["plan", "configs/quickstart.toml", "--device", "cpu", "--rates"]
    assert main([*run, str(make_file(replace(measured, copy=1e6, device="Snail 1")))]) == 0
    slow = " ".join(capsys.readouterr().out.split())
    assert f"rates of Snail 1 ({measured.threads} thread" in slow
    assert "copies and products were measured on this machine, 2026-11-28" in slow
    step = slow.partition("predicted: ")[2].partition(" a step")[0]
    assert " h " in step or " d " in step, "1 MB/s takes hours"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"day": 1, "ranks": [], "links": []}',
        '{"ranks": [{"rates": 1}]}',
    ],
)
def test_a_file_without_rates_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    assert main(["plan", "configs/quickstart.toml", "--rates", str(file)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "it has no rates that lather doctor has measured: make it again with" in shown


@pytest.mark.parametrize(
    "rates", [{"copy": 0.0}, {"fp32": float("nan")}, {"bf16": "fast"}, {"copy": 10**400}]
)
def test_rates_that_no_device_has_are_refused(make_file: MakeFile, rates: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no rates that lather doctor has measured"):
        doctor_rates(make_file(replace(GPU, **rates)), "gpu")


@pytest.mark.parametrize("link", [{"seconds": 0}, {"sent": 0}, {"sent": float("nan")}])
def test_an_exchange_that_no_link_has_is_refused(make_file: MakeFile, link: dict[str, Any]) -> None:
    links = [{"operation": "all-to-all", "num_bytes": 1, "sent": 1, "seconds": 1.0, **link}]
    with pytest.raises(ValueError, match="no rates that lather doctor has measured"):
        doctor_rates(make_file(GPU, links=links), "gpu")


def test_a_name_that_no_file_can_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "configs/quickstart.toml", "--rates", "x" * 300]) == 2
    assert "a file of lather doctor" in " ".join(capsys.readouterr().err.split())


def test_rates_of_another_kind_of_device_are_refused(make_file: MakeFile) -> None:
    with pytest.raises(ValueError, match=r"rates of a CPU, with --device cpu: give --device gpu"):
        doctor_rates(make_file(GPU), "cpu")
