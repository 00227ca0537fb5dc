"""The names and values of the runs of a sweep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lather.config.config import Config
from lather.config.fields import merged
from lather.config.loop import LoopConfig
from lather.config.toml_file import config_from_mapping, values_of_config
from lather.errors import ConfigError
from lather.sweep.grid import GridRun, grid, read_varied, short_names, text_of, words_of


def configure(values: dict[str, str]) -> Config:
    return replace(Config(), train=LoopConfig(steps=int(values["train.steps"])), seed=5)


def test_a_grid_has_all_combinations_with_the_first_seed_first() -> None:
    runs = grid({"train.steps": ["2", "030"]}, 2, configure)  # type: ignore[arg-type]
    assert [(run.values, run.config.seed, run.config.train.steps) for run in runs] == [
        ({"train.steps": "2"}, 5, 2),
        ({"train.steps": "30"}, 5, 30),
        ({"train.steps": "2"}, 6, 2),
        ({"train.steps": "30"}, 6, 30),
    ]


def test_keys_are_readable_stable_and_different() -> None:
    values = {"optim.name": "muon", "optim.rest.lr": "0.01", "optim.lr": "0.02"}
    run = GridRun(values, Config(seed=3))
    assert run.key == "optim.lr-0.02_name-muon_rest.lr-0.01_seed-3"
    assert GridRun(dict(reversed(values.items())), Config(seed=3)).key == run.key
    sources = ("a/b", "a b", "a-b", "../a", "a" * 300, "a" * 301, "é")
    keys = [GridRun({"data.source": source}, Config()).key for source in sources]
    assert len({*keys}) == len(keys)
    for key in keys:
        assert key.isascii()
        assert len(key) < 120
        assert not set(key) & set("/ '\"")


def test_names_are_as_short_as_they_can_tell_each_from_the_others() -> None:
    names = ["optim.lr", "optim.rest.lr", "train.steps", "seed"]
    assert short_names(names) == {
        "optim.lr": "optim.lr",
        "optim.rest.lr": "rest.lr",
        "train.steps": "steps",
        "seed": "seed",
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01, "0.01"), (1e-5, "1e-05"), (1 / 3, repr(1 / 3)), (3, "3"), (True, "true")],
)
def test_a_value_is_written_as_it_is_read(value: float, text: str) -> None:
    assert text_of(value) == text
    assert type(value)(eval(text.title() if isinstance(value, bool) else text)) == value


def test_switches_and_lists_become_the_words_of_a_command_line() -> None:
    base = {"optim": {"name": "soap"}}
    values = {"train.compile": "false", "train.recompute": "attention experts"}
    assert [*words_of(values, base)] == [
        *("--train.no-compile", "--train.recompute", "attention", "experts")
    ]
    config = config_from_mapping(merged(values_of_config(Config()), {"log.sample_prompt": "a b"}))
    text = text_of(config.log.sample_prompt)
    assert [*words_of({"log.sample_prompt": text}, base)] == ["--log.sample-prompt", "a b"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("'moments=int8,factors=int16', float32", ["moments=int8,factors=int16", "float32"]),
        ('"it\'s, a \\" b",c\\,d', ["it's, a \" b", "c,d"]),
        ("'',a b", ["", "a b"]),
    ],
)
def test_commas_within_quotes_do_not_divide(text: str, values: list[str]) -> None:
    varied = read_varied([f"log.sample_prompt={text}"])["log.sample_prompt"]
    words = [[*words_of({"log.sample_prompt": value}, {})] for value in varied]
    assert [" ".join(each[1:]) for each in words] == values


@pytest.mark.parametrize("text", ["it's,b", 'a,"b', "a,b\\"])
def test_a_quote_that_is_not_closed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a quote is not closed"):
        read_varied([f"data.pattern={text}"])
