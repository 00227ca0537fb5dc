"""Studies as data: what a file may say, which runs follow from the rows that exist, and where the
search for rates ends."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.convergence.study import Study, Trial, load_study
from lather.errors import ConfigError

HEAD = """\
name = "tiny"
{head}
[config.model]
vocab_size = 300
hidden_size = 16
[settings.small.train]
batch_size = 2
sequence_length = 16
[settings.large.train]
batch_size = 4
sequence_length = 16
[contestants.muon]
optim = {{ name = "muon", momentum = 0.9 }}
rates = {{ small = [1e-2, 2e-2], large = [2e-2, 2e-2] }}
[contestants.adamw]
optim = {{ name = "adamw" }}
rates = {{ small = [3e-3, 1e-2] }}
"""
COMPARE = "seeds = [1, 2]"
TUNE = "seeds = [1, 2]\ntuning = { seed = 0, factor = 2.0 }"


def study_of(folder: Path, head: str) -> Study:
    file = folder / "study.toml"
    file.write_text(HEAD.format(head=head))
    return load_study(file)


def finish(study: Study, loss: Callable[[Trial], float]) -> dict[str, dict[str, Any]]:
    """Return all rows of a study whose runs end at `loss`."""
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(100):
        wanted = study.wanted(rows)
        if not wanted:
            return rows
        assert not {trial.key for trial in wanted} & rows.keys()
        for trial in wanted:
            final = loss(trial)
            row = {
                "key": trial.key,
                "final": None if math.isinf(final) else final,
                "rates": trial.rates,
                "seed": trial.seed,
            }
            rows[trial.key] = {**row, "setting": trial.setting, "contestant": trial.contestant}
    raise AssertionError("the study does not end")


def test_runs_of_a_comparison(tmp_path: Path) -> None:
    study = study_of(tmp_path, COMPARE)
    runs = study.wanted({})
    assert [(trial.setting, trial.contestant, trial.seed) for trial in runs] == [
        ("small", "muon", 1),
        ("small", "muon", 2),
        ("small", "adamw", 1),
        ("small", "adamw", 2),
        ("large", "muon", 1),
        ("large", "muon", 2),
    ]
    config = runs[0].config(tmp_path / "run")
    assert (config.seed, config.optim.lr, config.optim.rest.lr, config.train.batch_size) == (
        1,
        1e-2,
        2e-2,
        2,
    )  # type: ignore[attr-defined]
    assert len({trial.key for trial in runs}) == len(runs)


def test_a_row_stands_for_its_run_alone(tmp_path: Path) -> None:
    study = study_of(tmp_path, COMPARE)
    first = study.wanted({})[0]
    left = study.wanted({first.key: {"key": first.key, "final": 1.0}})
    assert [trial.key for trial in left] == [trial.key for trial in study.wanted({})[1:]]
    changed = tmp_path / "study.toml"
    changed.write_text(changed.read_text().replace("momentum = 0.9", "momentum = 0.8"))
    assert first.key not in {trial.key for trial in load_study(changed).wanted({})}


def test_a_run_is_judged_by_the_weights_that_its_contestant_names(tmp_path: Path) -> None:
    averaged = 'weights = "average"\ntrain = { average_timescale = 0.5 }\nrates = { small = [3e-3'
    study = study_of(tmp_path, COMPARE)
    file = tmp_path / "study.toml"
    file.write_text(file.read_text().replace("rates = { small = [3e-3", averaged))
    muon, adamw = load_study(file).contestants
    row: dict[str, Any] = {
        "final": 3.0,
        "validation": [[8, 3.0]],
        "average_validation": [[4, 5.0], [8, 2.5]],
    }
    assert muon.judged(row) == row
    assert adamw.judged(row) == {**row, "final": 2.5, "validation": row["average_validation"]}
    diverged: dict[str, Any] = {"final": None, "validation": [[0, 7.0]]}
    assert adamw.judged(diverged) == diverged
    assert study.contestants[1].judged(row) == row


@settings(max_examples=50, deadline=None)
@given(best=st.tuples(st.floats(-4, 4), st.floats(-4, 4)), tilt=st.floats(-0.6, 0.6))
def test_the_search_ends_inside_what_it_tried(
    best: tuple[float, float], tilt: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On a bowl with its minimum anywhere, the search ends at rates that are better than their four
    neighbors, all of which it tried."""
    study = study_of(tmp_path_factory.mktemp("study"), TUNE)

    def loss(trial: Trial) -> float:
        start = {
            "muon": {"small": (1e-2, 2e-2), "large": (2e-2, 2e-2)},
            "adamw": {"small": (3e-3, 1e-2)},
        }[trial.contestant][trial.setting]
        x, y = (
            math.log2(rate / first) - middle
            for rate, first, middle in zip(trial.rates, start, best, strict=True)
        )
        return math.inf if x > 3 else 3 + x * x + y * y + tilt * x * y

    rows = finish(study, loss)
    for setting, contestant in study.pairs():
        rates = study.best_rates(contestant, setting, rows)
        assert rates is not None
        tried = {
            row["rates"]: row
            for row in rows.values()
            if (row["setting"], row["contestant"]) == (setting, contestant.name)
        }
        at_best = [row for row in tried.values() if row["rates"] == rates]
        assert at_best
        for lr, rest in ((2, 1), (0.5, 1), (1, 2), (1, 0.5)):
            key = study.trial(contestant, setting, 0, (rates[0] * lr, rates[1] * rest)).key
            assert (
                rows[key]["final"] is None
                or rows[key]["final"]
                >= rows[study.trial(contestant, setting, 0, rates).key]["final"]
            )
    compared = study.compared(rows)
    assert sorted({row["seed"] for row in compared}) == [1, 2]
    assert len(compared) == 6


def test_a_rule_that_always_diverges_ends_the_search(tmp_path: Path) -> None:
    finish(study_of(tmp_path, TUNE), lambda trial: math.inf)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("seeds = [1, 2]", "", "a list with at least one seed"),
        ("seeds = [1, 2]", "seeds = [0]\ntuning = { seed = 0, factor = 2.0 }", "not judged on it"),
        (
            "seeds = [1, 2]",
            "seeds = [1]\ntuning = { seed = 0, factor = 1.0 }",
            "tuning.factor = 1.0",
        ),
        ("seeds = [1, 2]", "seeds = [1]\nsede = 3", "sede = 3"),
        ("large = [2e-2, 2e-2] }", "huge = [2e-2, 2e-2] }", "for the settings small, large"),
        ("[1e-2, 2e-2]", "[1e-2]", "two rates above 0"),
        ("[1e-2, 2e-2]", "[1e-2, 0.0]", "two rates above 0"),
        (
            "momentum = 0.9",
            "momentum = 1.9",
            "contestant 'muon' in setting 'small': optim.momentum = 1.9",
        ),
        ("momentum = 0.9", "momentun = 0.9", "did you mean 'optim.momentum'"),
        ("optim = {{ name", "optin = {{ name", "contestants.muon.optim"),
        ("rates = {{ small = [3", 'weights = "mean"\nrates = {{ small = [3', "raw or average"),
        (
            "rates = {{ small = [3e-3",
            'weights = "average"\nrates = {{ small = [3e-3',
            "raw for runs without train.average_timescale",
        ),
        ("hidden_size = 16", "hidden_sise = 16", "did you mean 'model.hidden_size'"),
    ],
)
def test_errors_name_file_and_remedy(before: str, after: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    text = (
        HEAD.replace("{head}", COMPARE).replace(before, after).replace("{{", "{").replace("}}", "}")
    )
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_study(file)
    assert str(file) in str(error.value)
    assert said in str(error.value)


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*study file"):
        load_study(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("name =")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_study(tmp_path / "broken.toml")
