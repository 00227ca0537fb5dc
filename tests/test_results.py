"""docs/results.md and the numbers that README and docs quote are those of the rows under
benchmarks/results."""

import json
from pathlib import Path

import pytest

import result_tables
from benchmarks.convergence.queue import read_rows


def test_tables_and_quoted_numbers_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["result_tables.py", "--check"])
    assert result_tables.main() == 0


def test_a_wrong_number_is_noticed(tmp_path: Path) -> None:
    """A wrong number is noticed to the last digit that is shown, sign and unit aside; and so is a
    title that means nothing."""
    rows = tmp_path / "quickstart.jsonl"
    rows.write_text(json.dumps({"contestant": "muon", "loss": 4.0672, "seconds": 1234.5}) + "\n")
    page = tmp_path / "page.md"

    def wrong(text: str, title: str) -> list[str]:
        page.write_text(f'It ends at [{text}](quickstart.jsonl "{title}") nats.')
        return list(result_tables.wrong_quotes(page))

    for right in ("4.07", "4.0672", "+4.1", "4.07 nats"):
        assert not wrong(right, "muon: loss of the quickstart"), right
    for bad in ("4.06", "-4.07", "4.0673", "about four"):
        assert "which the rows say is [4.0672]" in wrong(bad, "muon: loss of the quickstart")[0], (
            bad
        )
    assert not wrong("1,234 s", "muon: seconds of the quickstart")  # halves are rounded to even
    assert "StopIteration" in wrong("4.07", "adamw: loss of the quickstart")[0]
    assert "is no quotable number" in wrong("4.07", "whatever")[0]


def test_the_short_study_has_the_rates_that_the_search_found() -> None:
    """This holds wherever the search has ended: no contestant has rates that nobody searched.
    Contestants in bf16 have the rates of their fp32 twins."""
    tune, short = result_tables.study_of("tune"), result_tables.study_of("short")
    rows = read_rows(result_tables.RESULTS / "convergence/tune/rows.jsonl")
    searched = {
        (setting, one.name): tune.search(one, setting, rows) for setting, one in tune.pairs()
    }
    for setting, one in short.pairs():
        best, missing = searched[setting, one.name.replace("-bfloat16", "")]
        assert missing or one.rates[setting] == pytest.approx(best), (setting, one.name)
    assert sum(not missing for _, missing in searched.values()) >= 30
