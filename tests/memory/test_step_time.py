"""The predicted time of a step: sums of what the dry runs count, corrected by a measured run."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_configs import config_of

from lather.cli import main
from lather.config.toml_file import config_to_toml
from lather.data.opening import open_datasets, open_source
from lather.errors import ConfigError
from lather.memory import plan_report
from lather.memory.plan import MemoryPlan, check_device, plan
from lather.memory.step_time import (
    BUS,
    LINK,
    StepTime,
    measured_run,
    step_time,
    typical_seconds,
    with_epochs,
)
from lather.memory.work import MICRO_BATCHES, REFRESH, REST, Work
from lather.memory.workers import Assumed
from lather.time_model.measured import MeasuredRates, table_of
from lather.time_model.rates import CORE, H100, RATES


@pytest.fixture(scope="module")
def planned() -> MemoryPlan:
    return plan(config_of("soap"), 1, Assumed("cpu"))


def with_work(planned: MemoryPlan, work: dict[str, Work], **changes: Any) -> MemoryPlan:
    """The plan of a rank with this work."""
    return replace(planned, ranks=(replace(planned.ranks[0], work=work),), **changes)


def test_kernels_launches_refreshes_and_transfers_are_added(planned: MemoryPlan) -> None:
    """On a CPU a launch is added to its work; a refresh counts once in ten steps."""
    work = {
        MICRO_BATCHES: Work(seconds=3.0, launches=1000),
        REST: Work(seconds=0.5, launches=100),
        REFRESH: Work(seconds=2.0, launches=200, parameters=3e9),
    }
    time = step_time(with_work(planned, work))
    assert time.passes == pytest.approx(3.0 + 1000 * CORE.host_seconds)
    assert time.optimizer == pytest.approx(0.7 + 120 * CORE.host_seconds)
    assert time.exchanges == pytest.approx(0.3e9 / CORE.kinds["exchanges"].bytes)
    assert time.seconds == pytest.approx(time.passes + time.optimizer + time.exchanges)
    assert (time.tokens, time.run_tokens) == (8 * 32, 8 * 32 * planned.config.train.steps)
    assert time.run_seconds == pytest.approx(planned.config.train.steps * time.seconds)
    assert time.mfu is None
    assert replace(time, scale=2.0).seconds == pytest.approx(2 * time.seconds)
    graph = replace(planned.config, train=replace(planned.config.train, cuda_graph=True))
    assert step_time(with_work(planned, work, config=graph)).passes == time.passes
    far = step_time(with_work(planned, work, world_size=16), machine=8)
    assert far.exchanges == pytest.approx(0.3e9 / LINK)


def test_the_host_of_a_gpu_runs_ahead_of_it(planned: MemoryPlan) -> None:
    many = {MICRO_BATCHES: Work(seconds=3.0, launches=10**6), REST: Work(seconds=1.0, launches=10)}
    on_gpu = with_work(planned, many, assumed=Assumed("gpu"))
    time = step_time(on_gpu)
    assert (time.passes, time.optimizer) == (pytest.approx(1e6 * H100.host_seconds), 1.0)
    assert time.mfu == pytest.approx(time.flops * time.tokens / time.seconds / H100.peak_flops)
    config = planned.config
    graph = replace(config, train=replace(config.train, cuda_graph=True))
    assert step_time(replace(on_gpu, config=graph)).passes == 3.0
    known = replace(config, log=replace(config.log, peak_flops=1e12))
    assert step_time(replace(on_gpu, config=known)).peak == 1e12


def test_offloaded_state_travels_once(planned: MemoryPlan) -> None:
    """Copies are operations, too, whose time does not count a second time."""
    present = planned.config
    plans = [
        plan(replace(present, optim=replace(present.optim, offload=offload)), 1, Assumed())
        for offload in (False, True)
    ]
    resident, offloaded = map(step_time, plans)
    assert resident.bus == 0.0
    assert offloaded.bus == pytest.approx(plans[1].bus[0] / BUS)
    seconds = [sum(work.seconds for work in each.ranks[0].work.values()) for each in plans]
    assert seconds[1] < 1.5 * seconds[0]


def test_work_grows_with_micro_batches_and_shrinks_on_a_faster_device() -> None:
    plans = {
        (rates, size): plan(config_of("adamw", batch_size=size), 1, Assumed(rates=rates))
        for rates, size in (("h100", 8), ("h100", 16), ("b200", 8))
    }
    works = {key: each.ranks[0].work for key, each in plans.items()}
    once, twice, faster = works.values()
    assert twice[MICRO_BATCHES].seconds == pytest.approx(2 * once[MICRO_BATCHES].seconds, rel=0.05)
    assert twice[MICRO_BATCHES].launches == pytest.approx(
        2 * once[MICRO_BATCHES].launches, rel=0.05
    )
    assert twice[REST].seconds == pytest.approx(once[REST].seconds, rel=0.05)
    assert faster[REST].seconds <= once[REST].seconds


def test_every_kind_has_a_rate_on_every_device() -> None:
    for table in RATES.values():
        assert table.kinds.keys() == H100.kinds.keys()
        for rate in table.kinds.values():
            assert rate.source.startswith(("measured", "assumed"))
            assert 0 < rate.bytes < math.inf


def test_refreshes_count_by_their_share_and_the_first_step_does_not() -> None:
    times = [9.0, 1.0, 3.0, 1.0, 1.1, 3.0, 1.0, 1.0]
    rows = [{"step_seconds": x, "refreshes_done": int(x >= 3.0)} for x in times]
    assert typical_seconds(rows) == pytest.approx((5 * 1.0 + 2 * 3.0) / 7)
    assert typical_seconds(rows[:1]) == 9.0


# --- measured runs --------------------------------------------------------------------------------

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path, planned: MemoryPlan) -> MakeRun:
    """Make the folder of a run with steps of 2 seconds."""

    def make(
        *, steps: int = 4, device: str | None = "cpu", cuda: str | None = None, since: int = 0
    ) -> Path:
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        (run / "config.toml").write_text(config_to_toml(planned.config))
        rows = [
            {"step": step, "loss": 1.0, "step_seconds": 2.0 if step > since + 1 else 9.0}
            | {"refreshes_done": 0, "skipped": False}
            for step in range(1, steps + 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        start = {"step": since, "ranks": "1 rank", "device": device, "cuda": cuda}
        start = {key: value for key, value in start.items() if key == "cuda" or value is not None}
        (run / "provenance.json").write_text(json.dumps({"starts": [start]}))
        return run

    return make


def test_a_measured_run_corrects_the_prediction_of_its_own_step_to_what_was_measured(
    make_run: MakeRun, planned: MemoryPlan
) -> None:
    run = measured_run(str(make_run()), "cpu")
    assert run is not None
    assert (run.rates, run.world_size, run.seconds) == ("cpu", 1, 2.0)
    time = replace(step_time(planned), scale=run.scale(planned))
    assert time.seconds == pytest.approx(2.0)


def test_steps_before_the_last_start_do_not_count(make_run: MakeRun) -> None:
    run = measured_run(str(make_run(steps=9, since=5)), "cpu")
    assert run is not None
    assert run.seconds == 2.0


def test_a_run_without_a_record_of_its_start_is_refused(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "provenance.json").unlink()
    with pytest.raises(ConfigError, match=r"continue it for a few steps, or give one of h100"):
        measured_run(str(folder), "cpu")


def test_a_run_on_a_gpu_has_the_rates_of_its_device(make_run: MakeRun) -> None:
    run = measured_run(str(make_run(device="cuda", cuda="NVIDIA H200")), "gpu")
    assert run is not None
    assert run.rates == "h200"
    assert measured_run("h100", "gpu") is None


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({}, "gpu", "rates of a GPU, with --device gpu: give --device cpu"),
        ({"steps": 0}, "cpu", "a run that has trained a step with a whole batch"),
        ({"since": 4}, "cpu", "with a whole batch since its last start"),
        ({"device": None}, "cpu", "does not say on which ranks and device"),
        ({"device": "cuda", "cuda": "NVIDIA RTX A1000"}, "gpu", "not on NVIDIA RTX A1000: give"),
        ({"device": "cuda", "cuda": "NVIDIA GB10"}, "gpu", "not on NVIDIA GB10: give the most"),
    ],
)
def test_a_run_that_says_nothing_is_refused(
    make_run: MakeRun,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    device: str,
    words: str,
) -> None:
    run = make_run(**changes)
    assert main(["plan", "configs/quickstart.toml", "--rates", str(run), "--device", device]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_rates_that_are_not_known_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "configs/quickstart.toml", "--rates", "h300"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "--rates = 'h300' is not valid: it must be one of h100, h200, a100, b200, cpu" in shown


IN_FP8 = ("--train.precision", "bf16", "--train.fp8", "block")


def test_a_plan_refuses_what_a_run_on_the_device_of_its_rates_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An A100 has no FP8; rates that were measured on one are its rates, too."""
    command = ["plan", "configs/quickstart.toml", *IN_FP8]
    assert main([*command, "--rates", "a100"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "train.fp8 = 'block' is not valid on NVIDIA A100: it must be an NVIDIA GPU of" in shown
    config = config_of("adamw")
    in_fp8 = replace(config, train=replace(config.train, precision="bf16", fp8="block"))
    measured = MeasuredRates("NVIDIA A100-SXM4-80GB", 0, 1.8e12, 18e12, 110e12, 220e12)
    with pytest.raises(ConfigError, match="not valid on NVIDIA A100-SXM4-80GB: it must be"):
        plan(in_fp8, 1, Assumed(measured=table_of(measured, None, "this machine")))
    for rates, table in RATES.items():
        if rates != "a100":
            check_device(in_fp8, table)
        check_device(config, table)


def test_the_command_says_how_long_a_step_and_the_run_take(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = make_run()
    command = ["plan", str(run / "config.toml"), "--device", "cpu", "--rates", str(run)]
    assert main([*command, "--json", str(tmp_path / "plan.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "predicted: 2 s a step, 128 tokens/s; 10 min 00 s for the run's 76,800 tokens" in shown
    assert "rates of one core of a CPU, times " in shown
    time = json.loads((tmp_path / "plan.json").read_text())["time"]
    assert time["seconds"] == pytest.approx(2.0)
    assert time["tokens_per_second"] == pytest.approx(128.0)


def test_the_lines_name_what_takes_the_time(planned: MemoryPlan) -> None:
    time = StepTime(1.0, 0.25, 0.5, 0.0, 1000, 10**9, 1e9, 989e12)
    first, second = plan_report.times(replace(planned, assumed=Assumed()), time)
    assert first == (
        "predicted: 1.8 s a step, 571 tokens/s, MFU 0.1%; 20 d 06 h for the run's 1.00 B tokens"
    )
    assert second.startswith("of the step passes 1 s, optimizer 250 ms, exchanges 500 ms; nothing")
    assert "rates of NVIDIA H100 80GB HBM3, assumed in part: trainings of one GPU took" in second
    epochs = replace(planned.config, train=replace(planned.config.train, epochs=3.0))
    of_epochs = replace(planned, config=epochs)
    time = step_time(of_epochs)
    assert (time.run_tokens, time.run_seconds) == (None, None)
    first = plan_report.times(of_epochs, time, "no data")[0]
    assert first.endswith("; no time for the run, as train.epochs counts its data: no data")
    known = with_epochs(time, of_epochs, 21)  # 63 sequences are 8 steps of 8
    assert known.run_tokens == 64 * 32
    assert known.run_seconds == pytest.approx(8 * time.seconds)
    assert plan_report.times(of_epochs, known)[0].endswith("run's 2,048 tokens in 3 epochs")


def test_the_command_counts_the_data_of_epochs_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data set is neither made for a plan, nor missed if a run has made it."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(6):
        (texts / f"{number}.txt").write_text(f"the letter of day {number} says little. " * 40)
    cache = str(tmp_path / "cache")
    config = config_of("muon")
    data = replace(config.data, source=str(texts), cache_dir=cache)
    config = replace(config, data=data, train=replace(config.train, epochs=2.0))
    file = tmp_path / "run.toml"
    file.write_text(config_to_toml(config))
    command = ["plan", str(file), "--device", "cpu"]
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no time for the run, as train.epochs counts its data: the data set of" in shown
    assert not Path(cache).exists()
    [dataset] = open_datasets(config.data, config.model.vocab_size, lambda line: None)
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    train = config.train
    length, batch = train.sequence_length, train.batch_size
    size = len(open_source(dataset, "train", config.data, length))
    tokens = -(-2 * size // batch) * batch * length
    assert f"for the run's {tokens:,} tokens in 2 epochs" in shown
