"""Tables and lines fit the terminal without a word or number that is cut, and are whole in a
pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lather.console import FittedTable, titled_table
from lather.lines import fit, flow, rule

NAME = "python-stdlib-2048-4e8cd3e0def4-and-more-of-a-long-name"


def wide_table() -> FittedTable:
    right = ("parameters", "optimizer", "gradients", "gathered", "activations", "to experts, GiB")
    table = titled_table(
        "128 ranks, each on a GPU, an even load of the experts; GiB at the peak",
        ("rank", "layers"),
        (*right, "temporaries", "peak"),
    )
    table.add_column("when")
    for rank in range(3):
        table.add_row(
            str(rank),
            "0-11, 36-47",
            *(f"{rank},234.{column}" for column in range(8)),
            "a step with [bold]refresh[/]",
        )
    return table


def printed(table: FittedTable, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200, 10_000])
def test_every_cell_of_a_table_is_whole_at_any_width(width: int) -> None:
    lines = printed(wide_table(), width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for rank in range(3):
        for column in range(8):
            assert words.count(f"{rank},234.{column}") == 1
    assert {"parameters", "activations", "experts,", "GiB", "peak", "refresh", "36-47"} <= {*words}
    assert (len([line for line in lines if "rank  layers" in line]) == 1) == (width >= 200)


def test_each_part_of_a_divided_table_names_its_rows() -> None:
    lines = printed(wide_table(), 60)
    first = [line.split()[0] for line in lines if line.strip() and line[1] != " "]
    parts = sum("\u2500" in line for line in lines)
    assert parts > 2
    assert [first.count(word) for word in ("rank", "0", "1", "2")] == [parts] * 4


def test_long_names_are_broken_between_their_parts_and_numbers_never() -> None:
    table = titled_table("", ("set", "split"), ("sequences", "tokens", "loss"))
    table.add_row(NAME, "validation", "1,370", "123,456,789", "3.9376")
    assert any(NAME in line for line in printed(table, 120))
    lines = printed(table, 80)
    assert max(map(len, lines)) <= 80
    assert not any(NAME in line for line in lines)
    assert "".join(line.split()[0] for line in lines[3:] if line.strip()) == NAME
    assert "123,456,789" in " ".join(lines).split()
    assert {"1,370", "123,456,789", "3.9376"} <= {*" ".join(printed(table, 60)).split()}


def test_texts_are_wrapped_before_a_table_is_divided() -> None:
    table = titled_table(left=("", "check"))
    table.add_column("found")
    table.add_row("ok", "others", "numpy 2.4.6, safetensors 0.8.0, " * 5)
    lines = printed(table, 60)
    assert max(map(len, lines)) <= 60
    assert sum("check" in line for line in lines) == 1
    assert " ".join(lines).split().count("2.4.6,") == 5


def test_lines_are_broken_between_words_below_their_text() -> None:
    assert (
        fit("made from    a, b and c, of which none is", 30)
        == "made from    a, b and c, of\n             which none is"
    )
    assert (
        fit("  --nproc N  start ranks on this machine", 30)
        == "  --nproc N  start ranks on\n             this machine"
    )
    assert (
        fit("no columns, and a long line of words", 20) == "no columns, and a\nlong line of words"
    )
    assert fit("a\n\n  b", 20) == "a\n\n  b"
    path = "x" * 50
    assert fit(f"written: {path}", 20) == f"written:\n{path}"
    assert fit("a word " * 50) == "a word " * 50  # the output of a test is no terminal


def test_fields_flow_onto_as_few_lines_as_they_need() -> None:
    assert flow(("loss 1.0", "lr 2.0", "grad 3.0"), 16) == ["loss 1.0  lr 2.0", "grad 3.0"]
    assert flow(("loss 1.0", "lr 2.0"), 5) == ["loss 1.0", "lr 2.0"]
    assert len(rule()) == len(rule("sample")) == 80
