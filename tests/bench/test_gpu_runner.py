"""`make gpu`: parts that fail, hang or are done do not stop the others, and it requires the
versions that the package requires."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import kernels
from benchmarks.check import CheckError
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import fp8, needs, training
from benchmarks.gpu import runner as runner_module
from benchmarks.gpu import tests as together
from benchmarks.gpu.clock import DeviceRates, peak_flops
from benchmarks.gpu.parts import MeasuredPart, all_parts, first_use
from benchmarks.gpu.runner import PartOutcome, Runner
from benchmarks.gpu.summary import collect, result
from benchmarks.gpu.work import Settings, main
from lather.kernels.block_scaled import grouped_product

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]


def fake(name: str, code: str, seconds: float = 60.0) -> MeasuredPart:
    return MeasuredPart(name, f"the part {name}", ("-c", code), seconds)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository that has nothing but a file of code."""
    (tmp_path / "root/src/lather").mkdir(parents=True)
    (tmp_path / "root/src/lather/code.py").write_text("x = 1\n")
    return tmp_path / "root"


@pytest.fixture
def runner(tmp_path: Path, root: Path) -> Runner:
    return Runner(tmp_path / "runs", lambda line: None, root)


GOOD = "print('it is right')"
BAD = "print('before'); raise SystemExit(3)"
SLEEP = "import time; time.sleep(60)"
START = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
HANGING = f"{START} print('waits'); {SLEEP}"


def test_one_that_fails_or_hangs_does_not_stop_the_rest(runner: Runner) -> None:
    begun = time.monotonic()
    outcomes = runner.run([fake("bad", BAD), fake("slow", HANGING, 2.0), fake("good", GOOD)])
    assert time.monotonic() - begun < 30
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "bad": "failed",
        "slow": "out of time",
        "good": "done",
    }
    assert outcomes["bad"].exit_status == 3
    assert "waits" in runner.log("slow").read_text()


def test_what_a_part_started_ends_with_it(runner: Runner, tmp_path: Path) -> None:
    left = tmp_path / "pid"
    code = f"{START} open({str(left)!r}, 'w').write(str(p.pid))"
    assert runner.run([fake("leaves one", code)])["leaves one"].status == "done"
    wait_for(lambda: not is_running(int(left.read_text())))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


@pytest.mark.skipif(sys.platform != "linux", reason="no other system ends it")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_part_ends_with_its_runner(number: signal.Signals, root: Path, tmp_path: Path) -> None:
    """Who ends the command after ten minutes must not leave a part on the device."""
    left = tmp_path / "pid"
    writing = f"import os, time; open({str(left)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "from pathlib import Path\n"
        "from benchmarks.gpu.parts import MeasuredPart\n"
        "from benchmarks.gpu.runner import Runner\n"
        f"part = MeasuredPart('waits', '', ('-c', {writing!r}), 60.0)\n"
        f"Runner(Path({str(tmp_path / 'runs')!r}), root=Path({str(root)!r})).run([part])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, env=environment)
    try:
        wait_for(lambda: left.exists() and left.read_text() != "")
        process.send_signal(number)
        process.wait(20)
        wait_for(lambda: not is_running(int(left.read_text())))
    finally:
        process.kill()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_parts_that_are_done_are_not_done_again_until_the_code_changes(
    runner: Runner, root: Path, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    counting = fake("counting", f"open({str(count)!r}, 'a').write('x')")
    for _ in range(2):
        assert runner.run([counting, fake("bad", BAD)])["bad"].status == "failed"
    assert count.read_text() == "x"
    runner.run([counting], fresh=True)
    assert count.read_text() == "xx"
    (root / "src/lather/code.py").write_text("x = 2\n")
    again = Runner(runner.folder, lambda line: None, root)
    again.run([counting])
    assert count.read_text() == "xxx"
    assert json.loads((runner.folder / "state.json").read_text())["counting"]["status"] == "done"


def test_a_part_is_left_for_the_next_call_if_there_is_no_time_for_it(runner: Runner) -> None:
    """Parts that this code has not tried come before those that failed."""
    order: list[str] = []
    chosen = [fake("bad", BAD), fake("long", GOOD, 600.0), fake("short", GOOD)]

    def call(minutes: float) -> dict[str, str]:
        runner._say = lambda line: order.append(line.partition(":")[0]) if " after " in line else 0
        order.clear()
        outcomes = runner.run(chosen, end=time.monotonic() + 60 * minutes)
        return {name: outcome.status for name, outcome in outcomes.items()}

    assert call(5) == {"bad": "failed", "short": "done"}
    assert call(15) == {"bad": "failed", "long": "done", "short": "done"}
    assert order == ["long", "bad"]
    assert call(0.5) == {"long": "done", "short": "done"}


def test_a_copy_of_the_code_elsewhere_goes_on(root: Path, tmp_path: Path) -> None:
    """A machine that gets a copy of the tree for each call keeps `runs`, which git ignores."""
    copy = tmp_path / "copy"
    (copy / "src/lather").mkdir(parents=True)
    (copy / "src/lather/commit.txt").write_text("not code\n")

    def marks(code: str) -> list[str]:
        (copy / "src/lather/code.py").write_text(code)
        return [
            Runner(tmp_path / "runs", root=place).fingerprint(
                MeasuredPart("a", "", ("-c", GOOD, f"{place}/runs/gpu"), 1.0)
            )
            for place in (root, copy)
        ]

    here, there = marks("x = 1\n")
    assert here == there
    here, there = marks("x = 2\n")
    assert here != there


def test_a_part_whose_wheels_are_missing_is_not_started(runner: Runner) -> None:
    part = replace(fake("wants", GOOD), needs={"no_such_wheel": "1.0", "nor_this": "2"})
    outcome = runner.run([part])["wants"]
    assert outcome.status == "not possible"
    lacks = "no_such_wheel >= 1.0 (is missing), nor_this >= 2 (is missing)"
    assert result("wants", outcome, runner) == f"needs {lacks}"


def test_the_summary_says_what_became_of_each_part(runner: Runner, tmp_path: Path) -> None:
    row = {
        "benchmark": "refresh",
        "config": {"hidden": 4, "mlp": 8},
        "ms": {"lather": {"median": 12.345}},
        "times_as_fast": 2.34,
        "share": 0.8,
        "goal": 0.75,
        "hardware": {"gpu": "G", "cpu": "C"},
    }
    chosen = [
        fake("refresh", GOOD),
        fake("bad", BAD),
        fake("slow", HANGING, 1.0),
        fake("never", GOOD),
    ]
    runner.run(chosen[:-1])
    runner._remember("old", PartOutcome("done", 1.0, 0, "of other code"))
    chosen.append(fake("old", GOOD))
    (runner.folder / "refresh.jsonl").write_text(json.dumps(row) + "\n")
    table = collect(chosen, runner, tmp_path / "out", publish=False)
    tmp_path /= "out"
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (tmp_path / "summary.md").read_text().splitlines()[2:]
    ]
    assert [line[:2] for line in lines] == [
        ["refresh", "done"],
        ["bad", "failed"],
        ["slow", "out of time"],
        ["never", "not run"],
        ["old", "done, by other code"],
    ]
    numbers = "80% of the rate of products (goal 75%), 2.3 x as fast, 12.3 ms"
    assert lines[0][3] == f"4 / 8: {numbers}"
    assert lines[1][3] == "before"
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == row
    assert (tmp_path / "summary.md").read_text() == table + "\n"
    assert "=== bad\nbefore" in (tmp_path / "logs.txt").read_text()


def test_the_parts_take_less_than_12_minutes(tmp_path: Path) -> None:
    everything = all_parts("cuda", tmp_path, small=False)
    assert sum(part.seconds for part in [first_use("cuda"), *everything]) <= 12 * 60
    assert len({part.name for part in everything}) == len(everything)


def test_all_files_of_tests_run_and_one_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, holds in {"right": True, "wrong": False}.items():
        (tmp_path / f"test_{name}.py").write_text(f"def test_it():\n    assert {holds}\n")
    monkeypatch.setattr(together, "FOLDER", tmp_path)
    (tmp_path / "test_slow.py").write_text(
        "import time\n\ndef test_a():\n    time.sleep(60)\n\ndef test_b():\n    pass\n"
    )
    monkeypatch.setattr(together, "DIVIDED", {"slow": ("test_a", "test_b")})
    assert together.main(["--seconds", "15"]) == 1
    *_, right, slow, fast, wrong, last = capsys.readouterr().out.splitlines()
    assert right.startswith("right: 1 passed in")
    assert slow == "slow test_a: not done after 15 s"
    assert fast.startswith("slow test_b: 1 passed, 1 deselected in")
    assert wrong.startswith("wrong: FAILED")
    assert wrong.partition("; ")[2].startswith("1 failed in")
    assert last == "failed: slow test_a, wrong"


def test_a_divided_file_has_a_process_for_every_test() -> None:
    for file, words in together.DIVIDED.items():
        options = ("--collect-only", *together.OPTIONS[1:])
        path = together.FOLDER / f"test_{file}.py"
        command = [sys.executable, "-m", "pytest", *options, str(path)]
        names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        tests = [line for line in names.stdout.splitlines() if "::" in line]
        assert tests
        for test in tests:
            assert sum(word in test.partition("::")[2] for word in words) == 1, test


def test_two_calls_of_nine_minutes_are_enough_if_every_part_hangs(
    monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path
) -> None:
    now = 0.0

    class HangingParts(Runner):
        def _run(self, part: MeasuredPart) -> PartOutcome:
            nonlocal now
            now += part.seconds
            return PartOutcome("out of time", part.seconds, None, self.fingerprint(part))

    monkeypatch.setattr(runner_module, "time", SimpleNamespace(monotonic=lambda: now))
    hanging = HangingParts(tmp_path, lambda line: None, root)
    everything, tried = all_parts("cuda", tmp_path, small=False), []
    for call in range(2):
        now = 1000.0 * call
        hanging.run_once(first_use("cuda"))
        hanging.run(everything, end=1000.0 * call + 9 * 60)
        assert now <= 1000.0 * call + 9 * 60
        tried.append([part.name for part in everything if hanging.is_tried(part)])
    assert {"kernels", "tests", "training-adamw", "training-soap_muon"} < set(tried[0])
    assert len(tried[0]) < len(everything) == len(tried[1])


def test_a_call_that_is_too_short_for_a_part_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--device", "cpu", "--small", "--minutes", "3"]) == 2
    assert "--minutes 3: there must be time for the longest part" in capsys.readouterr().err


def test_the_least_versions_are_those_of_the_package() -> None:
    asked = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    least = dict(line.split(">=") for line in asked)
    assert least["torch"] == needs.TORCH
    assert {wheel: least[wheel] for wheel in needs.TRAINER} == needs.TRAINER


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_finds_wheels_in_a_folder_of_their_own() -> None:
    outside = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    result = subprocess.run(
        ["make", "-n", "gpu", "INSTALL=0", "PYTHON=py", "ARGS=--minutes 9"],
        cwd=REPOSITORY,
        env={**outside, "PYTHONPATH": "/wheels"},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = "PYTHONPATH=src:/wheels py -m benchmarks.gpu --device cuda --minutes 9"
    assert expected.split() == result.stdout.split()


def test_the_page_says_what_is_needed() -> None:
    page = " ".join((REPOSITORY / "docs/gpu.md").read_text().split())
    needed = {
        **needs.TRAINER,
        **next(
            part.needs for part in all_parts("cuda", Path(), small=False) if part.name == "tests"
        ),
    }
    for wheel, least in {"torch": needs.TORCH, "Triton": needs.TRITON, **needed}.items():
        assert f"{wheel} {least}" in page, wheel
    for of_others in needs.OF_OTHERS["rich"]:
        assert of_others in page


def test_what_is_missing_is_named_with_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = needs.installed
    monkeypatch.setattr(needs, "installed", lambda wheel: None if wheel == "torch" else real(wheel))
    assert command.main(["--device", "cpu", "--small"]) == 2
    assert "torch >= 2.11 (is missing)" in capsys.readouterr().err
    monkeypatch.setattr(needs, "installed", lambda wheel: "0.1" if wheel == "rich" else real(wheel))
    assert command.main(["--device", "cpu", "--small"]) == 2
    printed = capsys.readouterr().out
    assert "rich >= 13 (is 0.1; it needs markdown-it-py, mdurl, pygments)" in printed


def test_the_command_needs_the_standard_library_alone_to_say_what_is_missing() -> None:
    loaded = "print(sorted({'torch', 'numpy', 'rich'} & sys.modules.keys()))"
    code = f"import sys; import benchmarks.gpu.__main__; {loaded}"

    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    assert result.stdout.splitlines()[-1] == "[]"


# --- the work of the parts ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kernels", "refresh", "block", "fp8"])
def test_rehearsal(name: str, tmp_path: Path) -> None:
    assert main([name, "--device", "cpu", "--small", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert rows
    assert all(
        row.keys() >= {"commit", "hardware", "versions", "config", "baseline", "check"}
        for row in rows
    )


def test_peers_in_fp8_are_measured_or_named_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, runner: Runner
) -> None:
    """Torch has no kernel for it on a CPU; a peer whose product is 1 % too large is not timed."""
    ours = fp8.CONTESTANTS["lather"]

    def times(factor: float) -> Callable[[fp8.ExpertOperands], fp8.ExpertProduct]:
        def make(given: fp8.ExpertOperands) -> fp8.ExpertProduct:
            product = ours(given)
            return replace(product, run=lambda: factor * product.run())

        return make

    for name, factor in {"deep_gemm": 1.0, "scaled_grouped_mm": 1.01}.items():
        monkeypatch.setitem(fp8.CONTESTANTS, name, times(factor))
    found = list(fp8.rows(Settings(CPU, small=True), ""))
    absent = {row["config"]["contestant"]: row["absent"] for row in found if "absent" in row}
    assert absent.keys() == {"scaled_grouped_mm", "scaled_grouped_mm, fast"}
    assert absent["scaled_grouped_mm"].startswith("CheckError: down: differs from its fp32 product")
    (runner.folder / "fp8.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    text = result("fp8", PartOutcome("done", 1.0, 0, ""), runner)
    assert text.startswith("gate/up: grouped_mm in bf16 ")
    assert "without scaled_grouped_mm, fast: " in text
    assert "deep_gemm " in text.partition("; down: ")[2]
    monkeypatch.setitem(fp8.CONTESTANTS, "lather", times(1.01))
    with pytest.raises(CheckError, match="gate/up"):
        list(fp8.rows(Settings(CPU, small=True), ""))


def test_a_product_of_transposed_weights_is_the_same_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient of an input multiplies with weights whose contracted dim is not contiguous."""
    taken: list[bool] = []

    def product(*args: Any, transposed: bool = False) -> Tensor:
        taken.append(transposed)
        return grouped_product(*args, transposed=transposed)

    monkeypatch.setattr(fp8, "grouped_product", product)
    names = ("grouped_mm", "lather", "lather, transposed")
    monkeypatch.setattr(fp8, "CONTESTANTS", {name: fp8.CONTESTANTS[name] for name in names})
    found = list(fp8.rows(Settings(CPU, small=True), ""))
    measured = {(row["config"]["contestant"], row["config"]["product"]): row for row in found}
    assert measured.keys() == {(name, product) for name in names for product in fp8.SMALL}
    assert taken == sorted(taken)
    assert {*taken} == {False, True}
    for product in fp8.SMALL:
        ours, turned = (measured[name, product]["check"] for name in names[1:])
        assert turned["difference_from_bf16"] == pytest.approx(ours["difference_from_bf16"], 0.01)


def test_a_peer_that_is_not_installed_is_named() -> None:
    missing = ModuleNotFoundError("No module named 'deep_gemm'", name="deep_gemm")
    assert fp8.reason(missing) == "deep_gemm is not installed"
    assert fp8.reason(RuntimeError("only for B\nat line 3")) == "RuntimeError: only for B"


@pytest.mark.grid
@pytest.mark.parametrize(
    "name", ["training-adamw", "training-muon", "training-soap_muon", "optimizer"]
)
def test_longer_rehearsal(name: str, tmp_path: Path) -> None:
    assert main([name, "--device", "cpu", "--small", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.jsonl")
    assert path.read_text()


def test_a_wrong_kernel_stops_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = iter(range(100)), kernels.rotate_pairs
    monkeypatch.setattr(
        kernels, "rotate_pairs", lambda *operands: real(*operands) * (1 + 0.02 * (next(calls) % 2))
    )
    found = kernels.rows(Settings(CPU, small=True), "")
    for _ in range(len(kernels.CASES) - 1):
        next(found)
    with pytest.raises(CheckError, match="rotary"):
        next(found)


def test_the_peak_is_the_makers_or_else_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(CPU, DeviceRates(1.0, 2.0)) == (2.0, "measured matrix product")
    for name, peak in {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA B200": 2250e12,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), DeviceRates(1.0, 2.0))[0] == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert peak_flops(torch.device("cuda"), DeviceRates(1.0, 2.0)) == (
        2.0,
        "measured matrix product",
    )


def test_training_gives_what_it_has_when_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "WARM_UP", 3)
    (row,) = training.rows(Settings(CPU, small=True, seconds=0.0), "adamw")
    assert row["config"]["steps"] == len(row["losses"]) == 4
    assert 0 < row["mfu"] < 1
    assert row["losses"][0] == pytest.approx(math.log(500), abs=0.1)  # a guess at random
    assert row["peak_bytes"] is None
