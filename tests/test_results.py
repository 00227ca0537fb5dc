"""docs/results.md and the numbers that README and docs quote are those of the rows under benchmarks/results."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def result_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("result_tables", REPOSITORY / "docs/result_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_and_quoted_numbers_are_those_of_the_rows(result_tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["result_tables.py", "--check"])
    assert result_tables.main() == 0


def test_pages_quote_numbers(result_tables: ModuleType) -> None:
    """So that the test above has something to find."""
    quoted = [quote for page in result_tables.pages() for quote in result_tables.QUOTED.findall(page.read_text())]
    assert len(quoted) >= 5
    assert len(result_tables.TABLE.findall(result_tables.PAGE.read_text())) >= 2


def test_a_wrong_number_is_noticed(result_tables: ModuleType, tmp_path: Path) -> None:
    """To the last digit that is shown, sign and unit aside; and a title that means nothing."""
    rows = tmp_path / "quickstart.jsonl"
    rows.write_text(json.dumps({"contestant": "muon", "loss": 4.0672, "seconds": 1234.5}) + "\n")
    page = tmp_path / "page.md"

    def wrong(text: str, title: str) -> list[str]:
        page.write_text(f'It ends at [{text}](quickstart.jsonl "{title}") nats.')
        return list(result_tables.wrong_quotes(page))

    for right in ("4.07", "4.0672", "+4.1", "4.07 nats"):
        assert not wrong(right, "muon: loss of the quickstart"), right
    for bad in ("4.06", "-4.07", "4.0673", "about four"):
        assert "which the rows say is [4.0672]" in wrong(bad, "muon: loss of the quickstart")[0], bad
    assert not wrong("1,234 s", "muon: seconds of the quickstart")  # half to even
    assert "StopIteration" in wrong("4.07", "adamw: loss of the quickstart")[0]
    assert "is no quotable number" in wrong("4.07", "whatever")[0]


def test_a_table_that_is_out_of_date_is_noticed_and_made_anew(
    result_tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "results.md"
    text = result_tables.PAGE.read_text()
    (_, study, setting, table, _) = result_tables.TABLE.findall(text)[0]
    page.write_text(text.replace(table, "| an old table |\n"))
    monkeypatch.setattr(result_tables, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["result_tables.py", "--check"])
    assert result_tables.main() == 1
    monkeypatch.setattr("sys.argv", ["result_tables.py"])
    assert result_tables.main() == 0
    assert page.read_text() == text
    assert table == result_tables.table(study, setting)
