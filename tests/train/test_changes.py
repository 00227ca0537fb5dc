"""A run that is changed between two starts has the losses of a training without interruption that
took the change."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from changing_runs import CHANGED_AT, MakeConfig, losses, run, uninterrupted
from lather.checkpoint.folder import list_checkpoints, step_of
from lather.config.changes import History, Row, class_of, differences, values_of
from lather.config.config import Config
from lather.config.fields import field_names
from lather.data.batch_sizes import BatchSizes
from lather.data.order import MixturePhase
from lather.errors import ConfigError, RunError
from lather.files import read_rows
from lather.models.families import ModelConfig
from lather.optim.batched import formats

CHANGES: dict[str, dict[str, Any]] = {
    "train.steps 4 -> 9, train.max_grad_norm 1 -> 0.1, optim.lr 0.01 -> 0.001, "
    "optim.rest.lr_factor 8 -> 1, optim.weight_decay 0.01 -> 0.5, optim.eps 1e-08 -> 0.0001": {
        "train": {"steps": 9, "max_grad_norm": 0.1},
        "optim": {"lr": 1e-3, "weight_decay": 0.5, "eps": 1e-4, "rest": {"lr_factor": 1.0}},
    },
    "optim.schedule linear -> cosine, optim.warmup_steps 2 -> 7": {
        "optim": {"schedule": "cosine", "min_lr_ratio": 0.0, "warmup_steps": 7}
    },
    "optim.precondition_frequency 2 -> 3, optim.stagger_refresh false -> true": {
        "optim": {"precondition_frequency": 3, "stagger_refresh": True}
    },
    "optim.weight_decay_method decoupled -> l2, optim.experts.lr none -> 0.001": {
        "optim": {
            **{"weight_decay_method": "l2", "weight_decay": 0.1},
            "experts": {"lr": 1e-3},
        }
    },
    "optim.state_dtype float32 -> int8": {"optim": {"state_dtype": "int8"}},
    "optim.decay_fraction 0.2 -> 0.3": {"optim": {"schedule": "wsd", "decay_fraction": 0.3}},
}
"""Changes of a run of four steps by parts of the note on them."""


@pytest.mark.parametrize("noted", CHANGES)
def test_a_change_counts_from_the_step_at_which_the_run_goes_on(
    make_config: MakeConfig, noted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MIN_CODED", 16)
    before, after = make_config(), make_config(**{"train": {"steps": 8}, **CHANGES[noted]})
    run(before)
    notes = run(after)
    assert losses(after.run_dir) == uninterrupted(before, after)
    [note] = [text for text in notes if text.startswith("from step 5 on: ")]
    assert all(part in note for part in noted.split(", "))
    rows = read_rows(Path(after.run_dir) / "metrics.jsonl")
    (first,) = (row["lr"] for row in rows if row["step"] == 5 and "lr" in row)
    assert note.endswith(f"; the learning rate of step 5 is {first:.3g}")
    [row] = History.read(Path(after.run_dir), {}).rows
    assert (row.step, row.describe()) == (4, note.rpartition(";")[0])


def test_the_schedule_of_a_kind_may_change_and_its_rate_is_noted(make_config: MakeConfig) -> None:
    rest = {"schedule": "constant", "warmup_steps": 0.9}
    before, after = make_config(), make_config(train={"steps": 8}, optim={"rest": rest})
    run(before)
    notes = run(after)
    assert losses(after.run_dir) == uninterrupted(before, after)
    [note] = [text for text in notes if text.startswith("from step 5 on: ")]
    assert "optim.rest.schedule none -> constant, optim.rest.warmup_steps none -> 0.9" in note
    peak = 8 * 0.01 * 5 / 7  # of a warm-up of 7 steps
    assert note.endswith(f", of router {peak:.3g}, of rest {peak:.3g}")


GROWTH = {"steps": 6, "batch_size": 6, "first_batch_size": 2, "batch_growth_steps": 4}


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_run_whose_batch_grows_resumes_at_any_step(
    make_config: MakeConfig, stop_after: int
) -> None:
    """The losses are those of a training without interruption on batches of these sizes."""
    config = make_config(train=GROWTH)
    run(config, stop_after=stop_after)
    run(config)
    assert losses(config.run_dir) == uninterrupted(config, config)
    rows = [row for row in read_rows(Path(config.run_dir) / "metrics.jsonl") if "loss" in row]
    assert [row["tokens"] for row in rows] == [16 * n for n in (2, 2, 4, 4, 6, 6)]
    with pytest.raises(RunError, match=r"train\.first_batch_size is 2 there and 0 here and 1 more"):
        run(make_config(train={**GROWTH, "first_batch_size": 0, "batch_growth_steps": 0}))


def test_a_mixture_may_change_while_the_batch_grows(
    make_config: MakeConfig, sets: list[str]
) -> None:
    before = make_config(data={"path": sets[:2]}, train=GROWTH)
    after = make_config(data={"path": sets[:2], "weights": [1.0, 3.0]}, train=GROWTH)
    run(before, stop_after=3)
    run(after)
    phases = [MixturePhase(0, (), 2), MixturePhase(2 + 2 + 4, (1.0, 3.0), 2)]
    assert losses(after.run_dir) == uninterrupted(before, after, phases, changed_at=3)


def test_state_in_8_bits_resumes_and_returns_to_fp32(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MIN_CODED", 16)
    coded = {"state_dtype": "moments=int8,bases=int8,factors=int8"}
    before, after = make_config(optim=coded), make_config(train={"steps": 8})
    whole = make_config(optim=coded, run_dir=f"{before.run_dir}-whole")
    run(whole)
    run(before, stop_after=2)
    run(before)
    assert losses(before.run_dir) == losses(whole.run_dir)
    notes = run(after)
    assert losses(after.run_dir) == uninterrupted(before, after)
    assert any(f"optim.state_dtype {coded['state_dtype']} -> float32" in x for x in notes)


MIXED = {"name": "soap_muon", "state_dtype": "moments=int8,bases=int8,factors=int8"}


@pytest.mark.parametrize(("start", "then"), [(0, 2), (0, 6), (6, 2), (2, 0)])
def test_a_second_momentum_comes_and_goes(
    make_config: MakeConfig, start: int, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed after four steps: from never to a step that is over or to come, to an earlier one,
    and to never."""
    monkeypatch.setattr(formats, "MIN_CODED", 16)
    before = make_config(optim={**MIXED, "slow_momentum_start": start})
    after = make_config(optim={**MIXED, "slow_momentum_start": then}, train={"steps": 8})
    run(before)
    notes = run(after)
    assert losses(after.run_dir) == uninterrupted(before, after)
    assert any(f"optim.slow_momentum_start {start} -> {then}" in note for note in notes)


@pytest.mark.parametrize(("fraction", "start"), [(0.5, 2), (0.9, 7)])
def test_a_start_that_is_a_fraction_moves_with_the_steps_until_it_is_passed(
    make_config: MakeConfig, fraction: float, start: int
) -> None:
    """Half of four steps, which the run has passed, stays step 2; 0.9 of them is step 4, and of
    eight steps step 7."""
    optim = {"name": "soap_muon", "slow_momentum_start": fraction}
    before = make_config(optim=optim, train={"steps": 4})
    after = make_config(optim=optim, train={"steps": 8})
    run(before, stop_after=3)
    run(after)
    values = History.read(Path(after.run_dir), {}).values
    assert values["optim.slow_momentum_start"] == start


@pytest.mark.parametrize(("fraction", "warmup"), [(0.5, 2), (0.9, 0.9)])
def test_a_warm_up_that_is_over_stays_over_in_a_longer_run(
    make_config: MakeConfig, fraction: float, warmup: float
) -> None:
    """Half of four steps is over after three; 0.9 of them is not, and moves with the steps."""
    optim = {"warmup_steps": fraction, "rest": {"warmup_steps": 0.25}}
    run(make_config(optim=optim, train={"steps": 4}), stop_after=3)
    after = make_config(optim=optim, train={"steps": 8})
    run(after)
    values = History.read(Path(after.run_dir), {}).values
    assert values["optim.warmup_steps"] == warmup
    assert values["optim.rest.warmup_steps"] == 1


def test_nothing_that_changes_nothing_is_recorded(make_config: MakeConfig) -> None:
    run(make_config(train={"steps": 2}))
    run(make_config(train={"steps": 2}, log={"every": 5}))
    assert not (Path(make_config().run_dir) / "changes.jsonl").exists()


def test_another_micro_batch_gives_the_losses_of_a_run_that_always_had_it(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """They are equal up to rounding, as sums over a batch are added in other parts. A balance
    evened over a micro-batch would depend on its size."""
    common: dict[str, Any] = {"moe": {"balance_level": "sequence"}}
    later = {"optim": {"schedule": "constant"}, **common}
    train = {"steps": 2, "precision": "fp64"}
    run(make_config(train=train, **common))
    run(make_config(train={**train, "steps": 6, "micro_batch_size": 1}, **later))
    train["micro_batch_size"] = 1
    always = str(tmp_path / "always")
    run(make_config(train=train, run_dir=always, **common))
    run(make_config(train={**train, "steps": 6}, run_dir=always, **later))
    assert losses(make_config().run_dir) == pytest.approx(losses(always), rel=1e-7)


def test_a_run_of_fewer_steps_than_are_done_is_refused_with_the_remedy(
    make_config: MakeConfig,
) -> None:
    run(make_config())
    with pytest.raises(
        RunError, match=r"train\.steps = 3 .* has done 4 steps: .*--fork-from RUN@STEP"
    ):
        run(make_config(train={"steps": 3}))


# --- the mixture of data --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "weights"),
    [(2, 2, [3.0, 1.0]), (2, 3, [1.0, 1.0, 8.0]), (1, 3, [0.0, 1.0, 1.0])],
    ids=["weights", "a data set more", "others alone"],
)
def test_the_mixture_may_change(
    make_config: MakeConfig, sets: list[str], first: int, then: int, weights: list[float]
) -> None:
    before = make_config(data={"path": sets[:first]})
    after = make_config(data={"path": sets[:then], "weights": weights}, train={"steps": 8})
    run(before)
    notes = run(after)
    phases = [MixturePhase(0, (), first), MixturePhase(CHANGED_AT * 4, tuple(weights), then)]
    assert losses(after.run_dir) == uninterrupted(before, after, phases)
    assert any("data.weights [] -> " in note for note in notes)
    last = make_config(data={"path": sets[:then], "weights": [1.0] * then}, train={"steps": 10})
    run(last)  # it changes once more
    assert History.read(Path(last.run_dir), {}).phases(BatchSizes(4)) == [
        *phases,
        MixturePhase(32, (1.0,) * then, then),
    ]
    data = json.loads((Path(last.run_dir) / "provenance.json").read_text())["data"]
    assert [folder for folder, _ in data] == sets[:then]


def test_data_sets_that_are_gone_or_without_weights_are_refused(
    make_config: MakeConfig, sets: list[str]
) -> None:
    before = make_config(data={"path": sets[:2]})
    run(before)

    def files() -> dict[Path, bytes]:
        paths = [path for path in Path(before.run_dir).rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in paths}

    recorded, gone = files(), "was trained on 2 data sets, and data.path names 1: name the earlier"
    for path, weights, message in [
        (sets, [], "data.path names 3: give data.weights"),
        ([sets[2], *sets[:2]], [1.0] * 3, "was trained on other tokens"),
        (sets[:1], [], gone),
    ]:
        with pytest.raises(RunError, match=message):
            run(make_config(data={"path": path, "weights": weights}, train={"steps": 8}))
    assert files() == recorded


# --- which fields ---------------------------------------------------------------------------------


def test_fields_of_each_class() -> None:
    names = set(field_names(Config))
    for expected, fields in {
        "free": "train.micro_batch_size train.device parallel.pp log.every data.source moe.memory",
        "changeable": "train.steps optim.lr optim.weight_decay optim.rest.lr_factor data.weights "
        "optim.schedule optim.decay_power optim.rest.warmup_steps",
        "fixed": "seed model.hidden_size train.batch_size train.precision optim.name data.packing",
    }.items():
        assert {*fields.split()} <= names
        assert {class_of(field) for field in fields.split()} == {expected}


def test_a_field_of_the_balance_loss_changes_as_the_key_of_moe_that_says_the_same() -> None:
    named = {name: class_of(f"model.{name}") for name in ModelConfig.balance_fields}
    same = {name: class_of(f"moe.{key}") for name, key in ModelConfig.balance_fields.items()}
    expected = {"aux_loss_alpha": "changeable", "router_aux_loss_coef": "changeable"}
    assert named == same == {**expected, "seq_aux": "fixed"}

    class Other(ModelConfig):
        balance_fields: ClassVar[Mapping[str, str]] = {"of_balance": "balance_coefficient"}

    assert class_of("model.of_balance", Other) == "changeable"
    assert class_of("model.of_balance") == class_of("model.seq_aux", Other) == "fixed"


def test_the_lists_name_fields_that_there_are() -> None:
    from lather.config import changes

    names = set(field_names(Config))
    sections = {name.partition(".")[0] for name in names}
    assert {*changes.FREE, *changes.CHANGEABLE, *changes.FIXED} <= names | sections
    options = {name.rpartition(".")[2] for name in names if name.startswith("optim.")}
    # options of rules that are not the default
    others = {"eps", "precondition_frequency", "stagger_refresh"}
    assert {*changes.CHANGEABLE_OPTIONS, *changes.FREE_OPTIONS} <= options | others


def test_the_documentation_names_every_field_that_may_change() -> None:
    from lather.config import changes

    text = (Path(__file__).parents[2] / "docs" / "changing-runs.md").read_text("utf-8")
    free, changeable = (
        next(line for line in text.splitlines() if line.startswith(f"| {which} |"))
        for which in ("free", "changeable")
    )
    for line, keys in [
        (free, (*changes.FREE, *changes.FREE_OPTIONS)),
        (changeable, (*changes.CHANGEABLE, *changes.CHANGEABLE_OPTIONS)),
    ]:
        words = set(re.findall(r"[\w.]+", line.replace("[", " ").replace("]", " ")))
        missing = [key for key in keys if not {key, key.rpartition(".")[2]} & words]
        assert not missing


# --- the history ----------------------------------------------------------------------------------


def row(step: int, key: str, old: Any, new: Any) -> Row:
    return Row(step, {key: (old, new)}, "then")


def test_what_was_changed_later_is_taken_back() -> None:
    now = {"a": 2, "b": 1, "c": 3}
    history = History((row(2, "a", 0, 1), row(5, "b", 0, 1), row(7, "a", 1, 2)), now)
    assert history.values_at(9) == now
    assert history.values_at(7) == {"a": 1, "b": 1, "c": 3}
    assert history.values_at(3) == {"a": 1, "b": 0, "c": 3}
    assert history.values_at(0) == {"a": 0, "b": 0, "c": 3}


def test_changes_that_no_step_has_seen_are_replaced() -> None:
    """One start is killed before its first checkpoint, and another with other options follows."""
    history = History((row(2, "a", 0, 1), row(5, "b", 0, 1)), {"a": 1, "b": 1})
    assert history.resumed(5, {"b": (0, 1)}, {"a": 1, "b": 1}) == history
    assert [each.changes for each in history.resumed(5, {"b": (0, 3)}, {}).rows] == [
        {"a": (0, 1)},
        {"b": (0, 3)},
    ]
    assert history.resumed(5, {}, {"a": 1, "b": 0}) == History(history.rows[:1], {"a": 1, "b": 0})
    assert [each.step for each in history.resumed(6, {"b": (1, 0)}, {}).rows] == [2, 5, 6]


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    history = History(
        (
            Row(2, {"optim.lr": (None, 0.1)}, "2026-01-01T00:00:00+00:00"),
            Row(4, {}, "then", "runs/a@4"),
        ),
        {"optim.lr": 0.1},
    )
    (tmp_path / "changes.jsonl").write_text(history.to_jsonl())
    assert History.read(tmp_path, {}) == history
    assert history.forked_from == "runs/a@4"
    (tmp_path / "changes.jsonl").write_text('{"changes": 3}\n')
    with pytest.raises(RunError, match=r"changes\.jsonl: damaged"):
        History.read(tmp_path, {})


def test_differences_leave_out_what_is_free(make_config: MakeConfig) -> None:
    one = values_of(make_config())
    other = values_of(
        make_config(log={"every": 9}, optim={"lr": 1.0}, data={"path": ["somewhere"]})
    )
    assert differences(one, other) == {"optim.lr": (0.01, 1.0)}


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_best_checkpoint_and_every_nth_are_kept(
    make_config: MakeConfig, asynchronous: bool
) -> None:
    """The rate is so high that the loss rises from the first step on, so that an early checkpoint
    is the best on any kind of CPU."""
    checkpoint = {"every": 2, "keep_last": 1, "keep_every": 4, "keep_best": True}
    config = make_config(
        train={"steps": 12, "validation_every": 1},
        optim={"lr": 1.0, "schedule": "constant"},
        checkpoint={**checkpoint, "asynchronous": asynchronous},
    )
    run(replace(config, train=replace(config.train, steps=7)))
    run(config)  # the best checkpoint of the first start is still known
    rows = read_rows(Path(config.run_dir) / "metrics.jsonl")
    validations = [row for row in rows if "validation_loss" in row and row["step"]]
    best = min((row["validation_loss"], row["step"]) for row in validations)[1]
    assert best not in (4, 8, 12)
    checkpoints = list_checkpoints(Path(config.run_dir) / "checkpoints")
    assert [step_of(path) for path in checkpoints] == sorted({best, 4, 8, 12})


def test_a_number_to_keep_that_never_comes_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"keep_every = 5 .* a multiple of checkpoint\.every \(2\), or 0"
    ):
        make_config(checkpoint={"keep_every": 5})
