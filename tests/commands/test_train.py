"""How many ranks `lather train` starts or joins, by its arguments and by the environment that
torchrun and SLURM make."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from lather.commands.train import train_command
from lather.errors import ConfigError, UserError
from lather.parallel.launch.start import stop_signals, take_nproc
from lather.parallel.launch.world import World
from tiny_run import write_config

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize(
    ("arguments", "rest", "nproc"),
    [
        (["a.toml"], ["a.toml"], None),
        (["a.toml", "--nproc", "4", "--seed", "1"], ["a.toml", "--seed", "1"], 4),
        (["--nproc=2", "a.toml"], ["a.toml"], 2),
        (["a.toml", "--log.sample-prompt", "x=y"], ["a.toml", "--log.sample-prompt", "x=y"], None),
    ],
)
def test_nproc_is_taken_off(arguments: list[str], rest: list[str], nproc: int | None) -> None:
    assert take_nproc(arguments) == (rest, nproc)


def test_nproc_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert take_nproc(["--nproc", "gpu"]) == ([], 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ConfigError,
        match=(
            r"^--nproc gpu starts a rank for each CUDA device, and there is "
            r"none: give a number of ranks, such as --nproc 2$"
        ),
    ):
        take_nproc(["--nproc", "gpu"])


def test_torchrun_and_slurm_say_the_same() -> None:
    by_torchrun, by_slurm = World.of_environment(TORCHRUN), World.of_environment(SLURM)
    assert by_torchrun == World(5, 8, 1, 4, ("gpu07", 29500))
    assert by_slurm is not None
    assert 20000 <= by_slurm.address[1] < 40000
    assert by_slurm == World(5, 8, 1, 4, ("gpu07", by_slurm.address[1]), sees_one_device=True)
    other_step = World.of_environment({**SLURM, "SLURM_STEP_ID": "4"})
    assert other_step is not None
    assert other_step.address != by_slurm.address


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({"SLURM_JOB_NODELIST": "a1,b[2-3]"}, "a1"),
        ({"SLURM_JOB_NODELIST": "rack3-gpu[011,013-19]-ib,b2"}, "rack3-gpu011-ib"),
        ({"SLURM_JOB_NODELIST": "login.cluster"}, "login.cluster"),
        ({"SLURM_STEP_NODELIST": "gpu08"}, "gpu08"),
        ({"MASTER_ADDR": "10.0.0.1"}, "10.0.0.1"),
        ({"SLURM_STEP_NUM_NODES": "1"}, "127.0.0.1"),
    ],
)
def test_the_machine_of_rank_0_under_slurm(changes: dict[str, str], host: str) -> None:
    world = World.of_environment({**SLURM, **changes})
    assert world is not None
    assert world.address[0] == host


def test_machines_may_have_different_numbers_of_tasks() -> None:
    tasks = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,3(x2)", "SLURM_LOCALID": "2"}
    world = World.of_environment({**tasks, "SLURM_NODEID": "2"})
    assert world is not None
    assert (world.local_rank, world.local_size) == (2, 3)
    with pytest.raises(
        ConfigError,
        match=r"^the environment variable SLURM_LOCALID = 2 is not valid: it must be from 0 to 1, ",
    ):
        World.of_environment({**tasks, "SLURM_NODEID": "0"})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
        },  # the shell of a batch script: srun has not started anything
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_process_joins_nobody(environment: dict[str, str]) -> None:
    assert World.of_environment(environment) is None


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert World(3, 4, 1, 2).device(cuda) == torch.device("cuda", 1)
    assert World(3, 4, 3, 4).device(cpu) == cpu
    assert World().device(cuda) == cuda
    with pytest.raises(
        ConfigError, match=r"rank 2 of 4 on this machine .* there are 2: .* --train\.device cpu"
    ):
        World(2, 4, 2, 4).device(cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_PROCID", "3")  # a shell that sbatch started has this variable, too
    with pytest.raises(ConfigError, match=r"rank 1 of 2 on this machine .* there are 1"):
        World(1, 2, 1, 2).device(cuda)
    tasks = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "3",
        "SLURM_STEP_NUM_NODES": "1",
    }
    task = World.of_environment(tasks)
    assert task is not None
    assert task.device(cuda) == torch.device("cuda", 0)


def test_help_shows_nproc(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_command(["--help"])
    assert "--nproc N" in capsys.readouterr().out


def test_one_process_may_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        train_command(
            [
                str(write_config(tmp_path)),
                "--nproc",
                "1",
                "--data.source",
                "nowhere",
                "--run-dir",
                str(tmp_path / "run"),
            ]
        )


def test_another_signal_leaves_a_run_that_is_saving_alone_and_a_repeated_one_ends_it() -> None:
    received: list[signal.Signals] = []
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup has it ignored
    try:
        with stop_signals(received.append):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert received == [signal.SIGINT, signal.SIGTERM]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, inherited)
