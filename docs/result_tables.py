"""Makes the tables of the studies from the rows under benchmarks/results, and checks the numbers
that the pages quote.

    python docs/result_tables.py            writes the tables between their markers
    python docs/result_tables.py --check    writes nothing; exit code 1 if a table or a quoted
                                            number is not what the rows say

Two markers ask for the table of a study and a setting:

    <!-- table: short qwen-1k -->
    <!-- end of table -->

`state-formats moments` for that of the formats of a part of the optimizer state, and
`context-exchange 8` for that of the exchange of 8 context ranks; `time-model rates`, and likewise
`predictions` and `measured`, for those of the time model. A quoted number is a link to its rows
whose title says which number it is; `QUOTABLE` has the forms:

    [0.58](../benchmarks/results/convergence/short/rows.jsonl "qwen-8k: steps of muon to adamw")
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# so that the checkout's `benchmarks`, which is not installed, is found
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import context_exchange, optimizer_report
from benchmarks.convergence.analysis import Findings
from benchmarks.convergence.command import BASELINES, load_findings
from benchmarks.convergence.queue import read_rows
from benchmarks.convergence.study import Study, final_loss, load_study
from benchmarks.convergence.tables import markdown_table
from benchmarks.launches import markdown
from benchmarks.optimizer_report import RunRange
from lather.sweep.intervals import Mean

REPOSITORY = Path(__file__).parents[1]
STUDIES = REPOSITORY / "benchmarks/studies"
RESULTS = REPOSITORY / "benchmarks/results"
COLUMNS = (
    "rule",
    "rates",
    "validation loss",
    "steps to adamw's loss",
    "less muon's",
    "optimizer, ms",
    "choices as in bf16",
)
"""Columns of a study's table that the pages show; `lather bench convergence report` has more."""
TABLE = re.compile(r"(<!-- table: ([\w-]+) ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
QUOTED = re.compile(r'\[([^\]]+)\]\(([^)\s]+\.jsonl?) "([^"]+)"\)')
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")


@functools.cache
def study_of(name: str) -> Study:
    sys.path.insert(0, str(STUDIES))
    return load_study(STUDIES / f"{name}.toml")


@functools.cache
def findings_of(name: str) -> Findings:
    return load_findings(study_of(name), RESULTS / "convergence" / name)


def joined_findings(*names: str) -> Findings:
    """Join the rows of studies that have a contestant's runs with different seeds."""
    return Findings([row for name in names for row in findings_of(name).rows])


def table(study: str, setting: str) -> str:
    """Make a table, in Markdown."""
    if study == "state-formats":
        return formats_table(setting)
    if study == "context-exchange":
        return context_exchange.markdown_table(_rows(context_exchange.OUT), int(setting))
    if study == "time-model":
        return time_model_table(setting)
    findings = findings_of(study)
    present = findings.contestants(setting)
    whole = markdown_table(findings, setting, [name for name in BASELINES if name in present])
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in whole.splitlines()]
    shown = [place for place, title in enumerate(rows[0]) if title in COLUMNS]
    return "".join("| " + " | ".join(row[place] for place in shown) + " |\n" for row in rows)


def formats_table(kind: str) -> str:
    """Make the table of the formats of a part of the state: their errors by decades."""
    errors: dict[str, dict[int, float]] = {}
    for row in _rows(RESULTS / "state-formats.jsonl"):
        config = row["config"]
        if config["kind"] == kind:
            number = row["correlation"] if kind == "factors" else row["error"]
            errors.setdefault(config["format"], {})[config["decades"]] = number
    decades = sorted(next(iter(errors.values())))
    lines = [
        [kind, "1 decade", *(f"{number} decades" for number in decades[1:])],
        ["---"] * (1 + len(decades)),
    ]
    for form, by_decades in errors.items():
        lines.append([f"`{form}`", *(f"{by_decades[number]:.2f}" for number in decades)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def time_model_table(name: str) -> str:
    """Make a table of the time model: its rates, what it predicts, or what was measured of it."""
    if name == "rates":
        return markdown.rates_table()
    rows = _rows(RESULTS / "launches.jsonl")
    if name == "predictions":
        return markdown.predictions_table(rows)
    measured = (_rows(path) for path in sorted(RESULTS.glob("gpu/*/rows.jsonl")))
    return markdown.measured_table(rows, [*itertools.chain(*measured)])


# --- quoted numbers -------------------------------------------------------------------------------


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _cases(path: Path) -> optimizer_report.Cases:
    return optimizer_report.by_case(_rows(path))


def _rates(path: Path, setting: str, name: str) -> tuple[float, float]:
    """The learning rates of matrices and of the rest with which all runs of a contestant were
    made."""
    rows = read_rows(path).values()
    (rates,) = {
        tuple(row["rates"])
        for row in rows
        if (row["setting"], row["contestant"]) == (setting, name)
    }
    return rates


def _searched(path: Path, setting: str, name: str) -> Callable[[float, float], dict[str, Any]]:
    """A function that returns the row at the best rates times two factors, on the seed of a search.
    Raises ValueError if the search has not ended."""
    study, rows = study_of(path.parent.name), read_rows(path)
    contestant = next(one for one in study.contestants if one.name == name)
    (lr, rest), missing = study.search(contestant, setting, rows)
    assert study.tuning is not None
    seed = study.tuning.seed
    if missing:
        raise ValueError(f"the search for rates of {name} in {setting} has not ended")

    def row_at(factor: float, rest_factor: float) -> dict[str, Any]:
        trial = study.trial(contestant, setting, seed, (lr * factor, rest * rest_factor))
        return contestant.judged(rows[trial.key])

    return row_at


def _lost_by_rates(path: Path, setting: str, name: str) -> float:
    """The most by which the loss rises if one of the two best rates is multiplied or divided by the
    factor of the search, on its seed."""
    row_at, tuning = _searched(path, setting, name), study_of(path.parent.name).tuning
    assert tuning is not None
    factors = (1 / tuning.factor, tuning.factor)
    around = [row_at(*pair) for by in factors for pair in ((by, 1.0), (1.0, by))]
    return max(map(final_loss, around)) - final_loss(row_at(1.0, 1.0))


def _quickstart(path: Path, name: str, key: str) -> float:
    return float(next(row[key] for row in _rows(path) if row["contestant"] == name))


def _format_error(path: Path, kind: str, form: str, key: str) -> float:
    """The number of a format of the state that was measured at one width of the spectrum."""
    (number,) = (
        row[key]
        for row in _rows(path)
        if (row["config"]["kind"], row["config"]["format"]) == (kind, form)
    )
    return float(number)


def _gib(path: Path, size: Callable[[dict[str, Any]], int]) -> float:
    return size(json.loads(path.read_text())) / 2**30


QUOTABLE: dict[str, Callable[..., float | tuple[float, float] | Mean | RunRange | None]] = {
    r"([\w-]+): ([\w-]+) less ([\w-]+)": lambda path, setting, a, b: findings_of(
        path.parent.name
    ).difference(setting, a, b),
    r"([\w-]+): ([\w-]+) less ([\w-]+), with the seeds of (\w+)": (
        lambda path, setting, a, b, other: joined_findings(path.parent.name, other).difference(
            setting, a, b
        )
    ),
    r"([\w-]+): percent of ([\w-]+) above ([\w-]+)": lambda path, setting, a, b: findings_of(
        path.parent.name
    ).percent_above(setting, a, b),
    r"([\w-]+): choices of ([\w-]+) as in bf16": lambda path, setting, name: findings_of(
        path.parent.name
    ).agreement(setting, name),
    r"([\w-]+): steps of ([\w-]+) to ([\w-]+)": lambda path, setting, a, b: findings_of(
        path.parent.name
    ).steps_ratio(setting, a, b),
    r"([\w-]+): rates of ([\w-]+)": _rates,
    r"([\w-]+): lost by ([\w-]+) at a rate off by the factor": _lost_by_rates,
    r"([\w-]+): loss of ([\w-]+) in the search": lambda path, setting, name: final_loss(
        _searched(path, setting, name)(1.0, 1.0)
    ),
    r"([\w-]+): best rates of ([\w-]+)": lambda path, setting, name: tuple(
        _searched(path, setting, name)(1.0, 1.0)["rates"]
    ),
    r"(\w+) of (\w+): geometric mean": lambda path, rule, peer: optimizer_report.geometric_mean(
        _cases(path), rule, peer
    ),
    r"(\w+) of (\w+): least": lambda path, rule, peer: optimizer_report.least(
        _cases(path), rule, peer
    ),
    r"([\w-]+): ([\w]+) of the quickstart": _quickstart,
    r"([\w .,]+) in (\w+): (error|orthonormality)": _format_error,
    r"percent of the error of (\w+) in (\w+)": lambda path, kind, form: (
        100 * _format_error(path, kind, form, "error")
    ),
    r"GiB sent to context ranks": lambda path: _gib(path, lambda plan: plan["ranks"][0]["context"]),
    r"GiB that a rank needs": lambda path: _gib(path, lambda plan: plan["needed"]),
    r"GiB at the peak": lambda path: _gib(
        path, lambda plan: max(rank["peak"] for rank in plan["ranks"])
    ),
    r"GiB at the peak of pipeline rank (\d+)": lambda path, rank: _gib(
        path, lambda plan: plan["ranks"][int(rank)]["peak"]
    ),
    r"GiB of temporaries in the optimizer's step": lambda path: _gib(
        path,
        lambda plan: max(
            sum(kinds.get(kind, 0) for kind in ("temporaries", "communication"))
            for rank in plan["ranks"]
            for kinds in [rank["steps"]["the first optimizer step"]["kinds"]]
        ),
    ),
    r"GiB of frozen weights in a step": lambda path: _gib(
        path, lambda plan: max(rank["host"]["frozen"] for rank in plan["ranks"])
    ),
    r"GiB of a checkpoint, largest rank": lambda path: _gib(
        path, lambda plan: max(rank["checkpoint"] for rank in plan["ranks"])
    ),
}
"""Patterns of links' titles, and the functions that give their numbers."""


def value_of(path: Path, title: str) -> float | tuple[float, float] | Mean | RunRange | None:
    """Return the number that the title names. Raises ValueError for a title of no known form."""
    for pattern, compute in QUOTABLE.items():
        if match := re.fullmatch(pattern, title):
            return compute(path, *match.groups())
    raise ValueError(
        f"{title!r} is no quotable number: give one of the forms {', '.join(QUOTABLE)}"
    )


def wrong_number(text: str, path: Path, title: str) -> str:
    """Say how a text differs from the number of the rows in `path` that the title names; an empty
    text if it does not."""
    try:
        value = value_of(path, title)
    except (ValueError, OSError, KeyError, StopIteration) as error:
        return f"[{text}] {title!r}: {error!r}"
    expected, numbers = _numbers(value), NUMBER.findall(text)
    if numbers and value is not None and all(map(_fits, numbers, expected)):
        return ""
    return f"[{text}] is not {title!r}, which the rows say is {expected}"


def wrong_quotes(page: Path) -> Iterator[str]:
    """Yield a line for each quoted number of the page that differs from its rows."""
    for text, target, title in QUOTED.findall(page.read_text()):
        if wrong := wrong_number(text, (page.parent / target).resolve(), title):
            yield f"{page.name}: {wrong}"


def _numbers(value: float | tuple[float, float] | Mean | RunRange | None) -> list[float | None]:
    """Return the numbers that a text may show, in this order."""
    match value:
        case tuple():
            return list(value)
        case Mean():
            return [value.value, value.half_width]
        case RunRange():
            return [value.median, value.least, value.most]
    return [value]


def _fits(shown: str, value: float | None) -> bool:
    digits, plain = len(shown.partition(".")[2]), shown.replace(",", "")
    return value is not None and f"{value:+.{digits}f}" == (
        plain if plain[0] in "+-" else f"+{plain}"
    )


def pages() -> list[Path]:
    return [
        REPOSITORY / "README.md",
        REPOSITORY / "CHANGELOG.md",
        *sorted((REPOSITORY / "docs").glob("*.md")),
    ]


def main() -> int:
    wrong = []
    for page in pages():
        before = page.read_text()
        after = TABLE.sub(lambda match: match[1] + table(match[2], match[3]) + match[5], before)
        if "--check" not in sys.argv:
            page.write_text(after)
        elif before != after:
            wrong.append(
                f"{page.name}: a table is not what the rows say: run python docs/result_tables.py"
            )
        wrong += wrong_quotes(page)
    print(*wrong, sep="\n")
    return int("--check" in sys.argv and bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
