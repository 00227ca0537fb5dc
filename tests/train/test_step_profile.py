"""Profiles of a run's steps by torch's own profiler."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from changing_runs import Shown, losses, run
from lather.config.config import Config
from lather.errors import ConfigError
from lather.parallel.mesh import Mesh
from lather.profiled import profiled
from lather.torch_private import profiler_is_on
from lather.train.step_profile import StepProfile
from lather.train.step_times import read_events

MakeConfig = Callable[..., Config]


def names_in(trace: Path) -> list[str]:
    plain = trace.with_name("plain.json")
    plain.write_bytes(gzip.decompress(trace.read_bytes()))
    return [each.name for each in read_events(plain) if each.category == "user_annotation"]


def test_a_run_writes_traces_with_names_and_a_picture_and_keeps_its_numbers(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    run(make_config(run_dir=str(tmp_path / "plain")))
    config = make_config(run_dir=str(tmp_path / "profiled"), profile={"steps": "2:3"})
    notes = run(config)
    folder = tmp_path / "profiled" / "profile" / "steps-2-3"
    assert {path.name for path in folder.iterdir()} == {
        "rank-0.json.gz",
        "times.json",
        "times.png",
    }
    names = names_in(folder / "rank-0.json.gz")
    assert [name for name in names if name.startswith("lather.step")] == [
        "lather.step.2",
        "lather.step.3",
    ]
    assert {
        *("lather.data", "lather.forward", "lather.backward", "lather.weight_gradients"),
        *("lather.action.0F0", "lather.action.0B1", "lather.read", "lather.optimizer"),
        *("lather.segment.embedding", "lather.segment.attention", "lather.segment.experts"),
        *("lather.backward.head", "lather.backward.attention", "lather.backward.embedding"),
        *("lather.optim.update", "lather.optim.refresh"),
    } <= set(names)
    (times,) = json.loads((folder / "times.json").read_text())["ranks"]
    for parts in (times["by_phase"], times["by_kind"]):
        assert sum(parts.values()) == pytest.approx(times["seconds"])
    assert min(times["by_phase"][name] for name in ("forward", "backward", "optimizer")) > 0
    assert any(note.startswith("profile of steps 2 to 3: ") for note in notes)
    assert any(str(folder / "times.png") in note for note in notes)
    assert losses(config.run_dir) == losses(tmp_path / "plain")
    assert not profiler_is_on()


def test_a_run_that_ends_early_writes_the_steps_that_it_did_and_one_past_them_says_so(
    make_config: MakeConfig,
) -> None:
    config = make_config(profile={"steps": "1 3:9"})
    run(config, stop_after=3)
    folders = {path.name for path in (Path(config.run_dir) / "profile").iterdir()}
    assert folders == {"steps-1-1", "steps-3-3"}
    notes = run(make_config(profile={"steps": "2"}))
    assert "no profile: profile.steps is 2, and 3 steps are done" in notes
    assert {path.name for path in (Path(config.run_dir) / "profile").iterdir()} == folders


def test_an_error_in_a_step_ends_the_profiler(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("lather.engine.step.TrainStep._change")
    config = make_config(profile={"steps": "1:3"})
    with pytest.raises(AttributeError, match="_change"):
        run(config)
    assert not profiler_is_on()


def test_a_profile_that_cannot_be_written_leaves_a_note(make_config: MakeConfig) -> None:
    config = make_config(profile={"steps": "2"})
    Path(config.run_dir).mkdir()
    shown = Shown()
    part = StepProfile(config, Mesh.single(torch.device("cpu")), shown.note, 0)
    part.folder.write_text("in the way")
    with part.step(2):
        torch.ones(2) + 1
    (note,) = shown.notes
    assert note.startswith(f"{part.folder / 'steps-2-2'} cannot be written (")
    assert note.endswith("the run goes on without it")
    assert not profiler_is_on()


def test_torch_makes_no_list_of_events_which_takes_most_of_the_time(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("torch.autograd.profiler.profile._parse_kineto_results")
    part = StepProfile(
        make_config(profile={"steps": "2"}), Mesh.single(torch.device("cpu")), Shown().note, 0
    )
    with part.step(2):
        torch.ones(2) + 1
    assert (part.folder / "steps-2-2" / "rank-0.json.gz").exists()


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_trace_that_is_incomplete_leaves_a_note_and_no_file(
    is_cut_off: bool, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk Kineto leaves what it has written under a name of its own, and says
    nothing."""

    def export(_: profile, path: str) -> None:
        written = Path(path if is_cut_off else f"{path}.tmp")
        written.write_text('{"traceEvents": [{"ph": "X", "na')

    monkeypatch.setattr(profile, "export_chrome_trace", export)
    config = make_config(profile={"steps": "2"})
    Path(config.run_dir).mkdir()
    shown = Shown()
    part = StepProfile(config, Mesh.single(torch.device("cpu")), shown.note, 0)
    with part.step(2):
        torch.ones(2) + 1
    (note,) = shown.notes
    assert note.startswith(f"{part.folder / 'steps-2-2'} cannot be written (")
    assert is_cut_off or "(there is no space, or the folder is not writable)" in note
    assert not [*(part.folder / "steps-2-2").iterdir()]
    assert not profiler_is_on()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of the sizes of files")
def test_a_trace_for_which_there_is_no_space_leaves_a_note_and_no_file(
    make_config: MakeConfig,
) -> None:
    import resource

    config = make_config(profile={"steps": "2"})
    Path(config.run_dir).mkdir()
    shown = Shown()
    part = StepProfile(config, Mesh.single(torch.device("cpu")), shown.note, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with part.step(2):
            for _ in range(2000):
                torch.ones(2) + 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (note,) = shown.notes
    assert "(there is no space, or the folder is not writable)" in note
    assert not [*(part.folder / "steps-2-2").iterdir()]


@pytest.mark.parametrize("text", ["13:10", "0:3", "1:", "1-3", "all"])
def test_what_is_no_range_is_refused(text: str, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"^profile\.steps = .* must be steps, counted from 1"):
        make_config(profile={"steps": text})


def test_ranges_exist_only_for_a_profiler_and_in_every_call() -> None:
    @profiled("outer")
    def fall(depth: int) -> int:
        with profiled(f"depth.{depth}"):
            return fall(depth - 1) if depth else 0

    assert fall(2) == 0
    with profile() as recorded:
        fall(2)
        with pytest.raises(ZeroDivisionError), profiled("failing"):
            1 / 0  # noqa: B018
    counts: dict[str, Any] = {each.key: each.count for each in recorded.key_averages()}
    assert {name: count for name, count in counts.items() if name.startswith("lather.")} == {
        "lather.outer": 3,
        "lather.failing": 1,
        **{f"lather.depth.{depth}": 1 for depth in range(3)},
    }
