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


def test_pages_quote_numbers() -> None:
    """Without quoted numbers the test above would find nothing."""
    quoted = [
        quote
        for page in result_tables.pages()
        for quote in result_tables.QUOTED.findall(page.read_text())
    ]
    assert len(quoted) >= 5
    assert (
        sum(len(result_tables.TABLE.findall(page.read_text())) for page in result_tables.pages())
        >= 2
    )


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


def test_rates_and_what_a_wrong_one_loses_are_those_of_the_rows(tmp_path: Path) -> None:
    """A page that quotes them from the study is right, and one that exchanges two rates or doubles
    one is not."""
    short, tune = "short.jsonl", "tune.jsonl"
    for name in ("short", "tune"):  # links of pages have no spaces; paths of checkouts may
        (tmp_path / f"{name}.jsonl").symlink_to(
            result_tables.RESULTS / "convergence" / name / "rows.jsonl"
        )
    page = tmp_path / "page.md"
    for right, wrong, rows, title in (
        ("0.016 / 0.032", "0.032 / 0.016", short, "qwen-8k: rates of muon"),
        ("0.006 / 0.016", "0.006 / 0.032", short, "qwen-8k: rates of soap"),
        ("0.09", "0.03", tune, "qwen-8k: lost by muon at a rate off by the factor"),
    ):
        for text, count in ((right, 0), (wrong, 1)):
            page.write_text(f'[{text}]({rows} "{title}")')
            assert len(list(result_tables.wrong_quotes(page))) == count, text


def test_a_table_that_is_out_of_date_is_noticed_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "results.md"
    text = (result_tables.REPOSITORY / "docs/results.md").read_text()
    (_, study, setting, table, _) = result_tables.TABLE.findall(text)[0]
    page.write_text(
        result_tables.QUOTED.sub("", text.replace(table, "| an old table |\n"))
    )  # its links do not hold there
    monkeypatch.setattr(result_tables, "pages", lambda: [page])
    monkeypatch.setattr("sys.argv", ["result_tables.py", "--check"])
    assert result_tables.main() == 1
    monkeypatch.setattr("sys.argv", ["result_tables.py"])
    assert result_tables.main() == 0
    assert page.read_text() == result_tables.QUOTED.sub("", text)
    assert table == result_tables.table(study, setting)


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
