"""`train` from a configuration to the end of a run, on meshes: a run writes the same files'
contents as one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_training import Silent, make_config, start, write_texts

from lather.checkpoint.folder import list_checkpoints
from lather.commands.eval import eval_command
from lather.config.config import Config
from lather.engine.engine import Engine
from lather.files import read_rows
from lather.memory.workers import Assumed
from lather.optim import MatrixOptimizer
from lather.parallel.local_parameters import LocalParameters
from lather.pipeline.partition import Partition
from lather.pipeline.picture import read_timeline
from lather.pipeline.schedule import WHOLE_STAGE, Kind, dualpipev
from lather.train import loop, memory_check
from lather.train.diverged import DivergedError
from lather.train.loop import train
from tiny_model import TINY
from tiny_run import TIME_FIELDS

pytestmark = pytest.mark.timeout(600)  # a free machine needs a tenth of this

MODEL: dict[str, Any] = {**TINY, "aux_loss_alpha": 0.01, "tie_word_embeddings": True}
EVERYTHING: dict[str, Any] = {
    "data": {"packed_attention": True},
    "moe": {"z_loss_coefficient": 0.01, "bias_update_rate": 0.01},
    "train": {
        "recompute": ["attention", "experts", "shared_experts"],
        "qk_clip": 0.017,
        "average_timescale": 0.5,
        "batch_size": 16,
        "first_batch_size": 8,
        "batch_growth_steps": 3,
    },
    "log": {"expert_load_every": 2, "attention_logits_every": 2},
}
FEW = {"batch_size": 4}
"""As many micro-batches as a pipeline of two ranks needs."""
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"log": {"picture": True}},
    "everything": EVERYTHING,
    "soap": {"train": FEW, "optim": {"name": "soap", "precondition_frequency": 2}},
    "async klsoap": {
        "train": FEW,
        "optim": {"name": "klsoap", "precondition_frequency": 1, "async_refresh": True},
    },
    "muon": {"train": FEW, "optim": {"name": "muon", "momentum": 0.9, "router": {"rule": "muon"}}},
    "deep": {
        "model": {"num_hidden_layers": 7},
        "train": {"steps": 2, "sequence_length": 64, **FEW},
    },
    "soap_muon": {
        "train": FEW,
        "optim": {
            "name": "soap_muon",
            "precondition_frequency": 2,
            "experts": {"rule": "muon"},
            "rest": {"betas": [0.8, 0.9]},
        },
    },
}
"""Runs that one process and meshes do."""
MESHES: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "pp2": ("plain", {"pp": 2}),
        "ep2 everything": ("everything", {"ep": 2, "poison": True}),
        "pp2 soap": ("soap", {"pp": 2}),
        "ep2 muon": ("muon", {"ep": 2}),
        "cp2 everything": ("everything", {"cp": 2, "poison": True}),
        "pp2 soap_muon": ("soap_muon", {"pp": 2}),
        "pp2 async klsoap": ("async klsoap", {"pp": 2}),
    },
    4: {
        "dp4": ("plain", {}),
        "cp2 pp2 muon": ("muon", {"cp": 2, "pp": 2}),
        "pp2 ep2 everything": ("everything", {"pp": 2, "ep": 2, "poison": True}),
    },
}


PROFILED = {
    "ep2 everything": "1",
    "pp2 soap": "2:3",
    "cp2 everything": "1",
}
"""Steps that runs profile: of those with many events the first, whose batch is small."""


def config_of(folder: Path, run_dir: str, *changes: dict[str, Any]) -> Config:
    return make_config(
        folder,
        run_dir,
        {"model": MODEL, "train": {"validation_every": 2}, "log": {"sample_tokens": 4}},
        *changes,
    )


def trainings(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Do all runs of this number of ranks; returns what `train` returned or raised on this rank."""
    found: dict[str, Any] = {}
    for name, (run, parallel) in MESHES[world_size].items():
        outcome = start(
            config_of(
                folder,
                name,
                RUNS[run],
                {"parallel": parallel, "log": {"timeline_every": 2}},
                {"profile": {"steps": PROFILED.get(name, "")}},
            )
        )
        found[name] = (outcome.finished, outcome.step, outcome.checkpoint.name)
    if world_size == 2:
        found["stopped"] = start(
            config_of(folder, "moved", EVERYTHING, {"parallel": {"pp": 2}}), stop_after=rank * 2
        ).step
        found["stopped again"] = start(
            config_of(folder, "moved", EVERYTHING, {"parallel": {"cp": 2}}), stop_after=rank
        ).step
        found["resumed"] = start(
            config_of(folder, "moved", EVERYTHING, {"parallel": {"ep": 2}})
        ).step
        found["diverged"] = diverge(rank, folder)
        found["at once"] = without_pieces(
            config_of(folder, "at once", RUNS["async klsoap"], {"parallel": {"pp": 2}})
        )
        found["partitioned by memory"] = partitioned_by_memory(rank, folder)
    else:
        found["with a prelude"] = train_with_prelude(folder)
    return found


def train_with_prelude(folder: Path) -> int:
    """Train with the prelude that ranks on GPUs do before the first step; return how many there
    were."""
    with (
        patch.object(loop, "is_gpu", return_value=True),
        patch.object(Engine, "run_prelude", autospec=True, side_effect=Engine.run_prelude) as calls,
    ):
        start(config_of(folder, "with a prelude", EVERYTHING, {"parallel": {"pp": 2, "ep": 2}}))
    return calls.call_count


def diverge(rank: int, folder: Path) -> str:
    """Make one gradient on the second rank NaN in steps 2, 4 and 5; two such steps in a row are too
    many."""
    collect = LocalParameters.collect_gradients
    calls = 0

    def collect_badly(self: LocalParameters) -> None:
        nonlocal calls
        calls += 1
        collect(self)
        if rank == 1 and calls in (2, 4, 5):
            self.gradients()[0].view(-1)[0] = torch.nan

    LocalParameters.collect_gradients = collect_badly  # type: ignore[method-assign]
    try:
        start(
            config_of(
                folder,
                "diverged",
                {"train": {"steps": 9, "max_skipped_steps": 2}, "parallel": {"pp": 2}},
            )
        )
    except DivergedError as error:
        return str(error)
    finally:
        LocalParameters.collect_gradients = collect  # type: ignore[method-assign]
    return "finished"


def partitioned_by_memory(rank: int, folder: Path) -> bool:
    """Train with the layers of the stages that rank 0, and it alone, finds. The search itself is
    left out, as a rank here may not have processes of its own."""

    def search(config: Config, world_size: int, assumed: Assumed) -> Partition:
        assert (rank, world_size, assumed.device) == (0, 2, "cpu")
        return Partition((1, 3, 1, 2), (2.0, 1.0), 3.0)

    with patch.object(memory_check, "memory_partition", search):
        return start(
            config_of(
                folder,
                "partitioned by memory",
                RUNS["deep"],
                {"parallel": {"pp": 2, "partition": "memory"}},
            )
        ).finished


def without_pieces(config: Config) -> bool:
    """Train with all refreshes done at the end of the step that begins them."""
    put_off = MatrixOptimizer.defer_refreshes
    MatrixOptimizer.defer_refreshes = lambda optimizer: optimizer._pending  # type: ignore[method-assign]
    try:
        return start(config).finished
    finally:
        MatrixOptimizer.defer_refreshes = put_off  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    write_texts(folder)
    for name, changes in RUNS.items():
        assert train(config_of(folder, name, changes), Silent()).finished
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(trainings, 2, folder, timeout=500)


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(trainings, 4, folder, timeout=500)


def assert_same_bits(run_dir: Path, expected: Path, num_ranks: int) -> None:
    """Compare the rows and the checkpoints of two runs of four steps, apart from random states, of
    which these processes have one for all of their runs."""
    rows, wanted = (
        list(map(timeless, read_rows(path / "metrics.jsonl"))) for path in (run_dir, expected)
    )
    assert rows == wanted
    for rank in range(num_ranks):
        saved, others = (
            load_file(path / "checkpoints" / "step-00000004" / f"rank-{rank:05}.safetensors")
            for path in (run_dir, expected)
        )
        assert saved.keys() == others.keys()
        assert all(
            value.equal(others[name])
            for name, value in saved.items()
            if not name.startswith("random/")
        )


def assert_same_rows(run_dir: Path, expected: Path, rel: float = 1e-4) -> None:
    """Compare the rows of two runs. In fp32 SOAP turns rounding into other choices of a router;
    test_engine.py compares SOAP in fp64."""
    rows, wanted = (
        [timeless(row) for row in read_rows(path / "metrics.jsonl")] for path in (run_dir, expected)
    )
    assert [row.keys() for row in rows] == [row.keys() for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        for key, value in row.items():
            if key == "expert_load":
                assert torch.tensor(value).equal(torch.tensor(other[key])), (row["step"], key)
            elif key == "attention_logits":
                logits, expected = torch.tensor(value), torch.tensor(other[key])
                torch.testing.assert_close(logits, expected, rtol=1e-3, atol=0)
            elif isinstance(value, float):
                if rel < 1e-2 or not key.startswith("expert_load"):
                    assert value == pytest.approx(other[key], rel=rel), (row["step"], key)
            else:
                assert value == other[key], (row["step"], key)


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in TIME_FIELDS}


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_mesh_writes_the_rows_of_one_process(
    world_size: int, folder: Path, request: pytest.FixtureRequest
) -> None:
    for found in request.getfixturevalue({2: "two", 4: "four"}[world_size]):
        for name, (run, _) in MESHES[world_size].items():
            assert found[name] == (True, 4, "step-00000004"), name
            assert_same_rows(
                folder / name, folder / run, rel=1e-2 if run.endswith("soap") else 1e-4
            )
            assert (folder / name / "loss.png").exists() == (run == "plain")


def test_the_rows_show_that_the_options_count(folder: Path) -> None:
    losses = [
        [row.get("loss", 0.0) for row in read_rows(folder / name / "metrics.jsonl")]
        for name in RUNS
    ]
    assert len({json.dumps(each) for each in losses}) == len(RUNS)


@pytest.mark.usefixtures("two")
def test_one_process_evaluates_what_context_ranks_trained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lather eval`, `generate` and `score` find a model in the same way."""
    losses = []
    for name in ("everything", "cp2 everything"):
        eval_command([str(folder / name), "--max-sequences", "2", "--json"])
        out, err = capsys.readouterr()
        (found,) = json.loads(out)["sets"].values()
        losses.append(found["loss"])
        assert ("without the run's 2 context ranks" in err) == name.startswith("cp2")
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_stop_that_one_rank_is_asked_for_stops_all_and_another_mesh_goes_on(
    two: list[dict[str, Any]], folder: Path
) -> None:
    assert [found["stopped"] for found in two] == [2, 2]
    assert [found["stopped again"] for found in two] == [3, 3]
    assert [found["resumed"] for found in two] == [4, 4]
    assert [path.name for path in list_checkpoints(folder / "moved" / "checkpoints")] == [
        "step-00000003",
        "step-00000004",
    ]
    assert_same_rows(folder / "moved", folder / "everything")


def test_a_prelude_before_the_first_step_changes_no_bit_of_a_run(
    four: list[dict[str, Any]], folder: Path
) -> None:
    assert [found["with a prelude"] for found in four] == [1] * 4
    assert_same_bits(folder / "with a prelude", folder / "pp2 ep2 everything", 4)


def test_layers_partitioned_by_memory_change_no_number(
    two: list[dict[str, Any]], folder: Path
) -> None:
    assert all(found["partitioned by memory"] for found in two)
    assert_same_rows(folder / "partitioned by memory", folder / "deep")


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(
    two: list[dict[str, Any]], folder: Path
) -> None:
    texts = [found["diverged"] for found in two]
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "2 steps in a row, the last of them step 5, had a loss or gradient that was not finite"
    )
    rows = [row for row in read_rows(folder / "diverged" / "metrics.jsonl") if "loss" in row]
    assert [row["skipped"] for row in rows] == [False, True, False, True, True]
    assert [row["grad_norm"] is None for row in rows] == [False, True, False, True, True]


def test_every_rank_of_a_mesh_writes_a_trace(two: object, folder: Path) -> None:
    phases = {"ep2 everything": "exchange of tokens", "cp2 everything": "exchange of sequences"}
    for name, steps in PROFILED.items():
        profile = folder / name / "profile" / f"steps-{steps[0]}-{steps[-1]}"
        assert {path.name for path in profile.iterdir()} == {
            *("rank-0.json.gz", "rank-1.json.gz", "times.json", "times.png")
        }
        for times in json.loads((profile / "times.json").read_text())["ranks"]:
            assert times["by_phase"][phases.get(name, "waits for ranks")] > 0
            assert times["by_kind"]["communication"] > 0
            assert sum(times["by_phase"].values()) == pytest.approx(times["seconds"])


# --- what happened when ---------------------------------------------------------------------------


def test_the_timeline_has_every_action_of_every_rank(four: object, folder: Path) -> None:
    table = dualpipev(2, 8)  # of the fourth step, whose batch has grown
    file = folder / "pp2 ep2 everything" / "timeline.jsonl"
    step, events = read_timeline(file)
    assert step == 4
    steps = [row["step"] for row in read_rows(file)]
    assert sorted(set(steps)) == [2, 4]
    for rank in range(4):
        of_rank = [event for event in events if event.rank == rank]
        own = [event for event in of_rank if event.action.kind not in WHOLE_STAGE]
        row = [action for action in table.ranks[rank // 2] if action.kind not in WHOLE_STAGE]
        assert list(dict.fromkeys(event.action for event in own)) == row
        beside = {event.action.kind for event in of_rank} & WHOLE_STAGE
        assert beside == {Kind.UNSHARD, Kind.REDUCE_GRAD}
        times = [time for event in own for time in (event.start, event.end)]
        assert times == sorted(times)
        assert times[0] >= 0


def test_refreshes_in_the_gaps_of_a_pipeline_have_the_same_bits_and_are_in_the_timeline(
    two: list[dict[str, Any]], folder: Path
) -> None:
    assert all(found["at once"] for found in two)
    run = folder / "pp2 async klsoap"
    assert_same_bits(run, folder / "at once", 2)
    pieces = [row for row in read_rows(run / "timeline.jsonl") if row["action"].endswith("REFRESH")]
    assert {row["rank"] for row in pieces} == {0, 1}
    assert {row["step"] for row in pieces} == {4}  # KL-SOAP makes its first bases after step 2
