"""The page of a run has the numbers of the run's files, loads nothing, and takes no text of users
for HTML."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lather.cli import main
from lather.config.changes import History, Row
from lather.config.config import Config
from lather.config.toml_file import config_to_toml
from lather.engine.trained_parameters import active_parameters, outline, trained_parameters
from lather.files import read_rows
from lather.models.experts import Experts
from lather.train.metrics import MetricsWriter, StepRow
from lather.train.report import MOST_STEPS, curves, write_report
from lather.train.report import facts as facts_of

HOSTILE = (
    "</script></pre><img src=https://evil.example/x "
    "onerror=alert(1)><!--<script> {{data}} & ünï\u2028"
)


class Tags(HTMLParser):
    """Collects the elements of a page, the addresses that they would load, and the text of each
    `pre` and of the page's data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.sources: list[str | None] = []
        self.texts: list[str] = []
        self.is_text = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.sources += [
            value for name, value in attributes if name in ("src", "href", "srcset", "onerror")
        ]
        self.is_text = tag == "pre" or ("type", "application/json") in attributes
        if self.is_text:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.is_text = False

    def handle_data(self, data: str) -> None:
        if self.is_text:
            self.texts[-1] += data


START = {"time": "then", "step": 0, "ranks": "1 rank", "device": "cpu", "threads": 1}


@pytest.fixture
def run(tmp_path: Path, step_row: Callable[..., StepRow], config: Config) -> Path:
    """A run of six steps, the fourth skipped, with everything that a run may have."""
    run = tmp_path / "a <b>run"
    run.mkdir()
    writer = MetricsWriter(run, None)
    writer.write({"step": 0, "seconds": 0.0, "validation_loss": 6.5})
    for step in range(1, 7):
        skipped = step == 4
        writer.write(
            step_row(
                step,
                lr=step * 1.23e-3,
                grad_norm=step + 0.25,
                loss=float("nan") if skipped else 5.0 / step,
                skipped=skipped,
            )
        )
        if step % 2 == 0:
            writer.write(
                {
                    "step": step,
                    "seconds": 0.1 * step,
                    "expert_load": [[0.5, 1.5], [step / 10, 2 - step / 10]],
                }
            )
    writer.write(
        {
            "step": 6,
            "seconds": 0.6,
            "validation_loss": 4.5,
            "validation_losses": {HOSTILE: 4.5, "b": 4.75},
        }
    )
    writer.close()
    (run / "config.toml").write_text(f"# {HOSTILE}\n" + config_to_toml(config), "utf-8")
    (run / "sample.txt").write_text(HOSTILE, "utf-8")
    history = History((Row(2, {}, "then", "runs/a@2"), Row(3, {"train.steps": (4, 6)}, HOSTILE)))
    (run / "changes.jsonl").write_text(history.to_jsonl(), "utf-8")
    sizes = {
        "kinds": {"parameters": {"planned": 100, "seen": 200}},
        "peak": {"planned": 300, "seen": None},
    }
    (run / "memory.json").write_text(json.dumps({"world_size": 1, "ranks": [{"rank": 0, **sizes}]}))
    (run / "provenance.json").write_text(
        json.dumps({"data": [[HOSTILE, "abc"]], "torch": "2.13.0", "cuda": None, "starts": [START]})
    )
    events = [
        {"step": 6, "rank": rank, "action": f"{rank}{kind}0", "start": at, "end": at + 1}
        for rank in (0, 1)
        for at, kind in enumerate("FB")
    ]
    (run / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    return run


def page_of(run: Path) -> str:
    write_report(run, run / "report.html")
    return (run / "report.html").read_text("utf-8")


def data_of(page: str) -> dict[str, Any]:
    """Parse the data as a browser does: JSON up to the first end of the script."""
    (block,) = re.findall(
        r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL
    )
    data: dict[str, Any] = json.loads(block)
    return data


def test_the_page_has_the_numbers_of_the_runs_files(run: Path) -> None:
    data, rows = data_of(page_of(run)), read_rows(run / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    for name in ("step", "seconds", "loss", "lr", "grad_norm", "peak_memory_bytes"):
        assert data["curves"][name] == [row[name] for row in steps]
    assert data["curves"]["loss"][3] is data["curves"]["smoothed"][3] is None
    assert data["curves"]["tokens"] == [64, 128, 192, 256, 320, 384]
    assert data["curves"]["smoothed"][0] == pytest.approx(5.0, rel=0.2)
    assert data["validation"] == [row for row in rows if "validation_loss" in row]
    assert data["loads"]["steps"] == [2, 4, 6]
    assert data["loads"]["blocks"] == [
        [row["expert_load"][block] for row in rows if "expert_load" in row] for block in (0, 1)
    ]
    assert data["memory"]["ranks"] == [[0, [["parameters", 100, 200], ["peak", 300, None]]]]
    assert len(data["memory"]["notes"]) == 1
    assert [bar[:2] for bar in data["schedule"]["bars"]] == [[0, 1], [1, 2]] * 2
    assert data["schedule"]["bubble"] == 0
    assert data["marks"] == [[2, "fork"], [3, "steps 4 \N{RIGHTWARDS ARROW} 6"]]
    assert [text for _, text in data["happened"]] == [
        "forked from runs/a@2",
        "from step 4 on: train.steps 4 -> 6",
        "step 4 was skipped: loss or gradient not finite",
    ]
    assert ["torch", "2.13.0"] in data["machine"]
    assert ["validation loss", "6.5000 \N{RIGHTWARDS ARROW} 4.5000"] in data["tiles"]
    assert data["notes"] == []


def test_texts_of_users_are_no_html_and_nothing_is_loaded(run: Path) -> None:
    page = page_of(run)
    tags = Tags(page)
    assert tags.sources == []
    assert "img" not in tags.opened
    assert "b" not in tags.opened
    assert tags.opened.count("script") == 3
    data, sample, configuration = tags.texts
    assert sample == HOSTILE
    assert configuration.startswith(f"# {HOSTILE}\n")
    assert json.loads(data) == data_of(page)
    assert HOSTILE in data_of(page)["machine"][0][1]
    assert html.escape(run.name) in page
    assert "default-src 'none'" in page
    code = page.replace(html.escape(HOSTILE), "").replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(
        r"https?://|@import|url\(|fetch\(|XMLHttpRequest",
        re.sub(r'<script id="data".*?</script>', "", code, flags=re.DOTALL),
    )


FILES = ("metrics", "changes", "timeline", "memory", "provenance", "config", "sample")


@pytest.mark.parametrize("name", FILES)
def test_a_run_without_a_file_or_with_a_damaged_one_shows_the_rest(run: Path, name: str) -> None:
    (file,) = run.glob(f"{name}.*")
    part = "memory" if name == "metrics" else "curves"
    before = data_of(page_of(run))
    file.write_bytes(b'{"step": []}\n\xff[1]\n')
    damaged = data_of(page_of(run))
    assert bool(damaged["notes"]) == (name != "sample")
    file.unlink()
    absent = data_of(page_of(run))
    assert absent["notes"] == []
    assert absent[part] == damaged[part] == before[part]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("garbage\n", "not a row of metrics"),
        ('{"step": 6, "loss": NaN}\n', "not a row of metrics (it has no seconds)"),
        ('{"step": 6, "validation_loss": 2}\n', "not a row of metrics (it has no seconds)"),
    ],
)
def test_a_damaged_row_is_named_by_the_command_too(
    run: Path, capsys: pytest.CaptureFixture[str], damage: str, why: str
) -> None:
    metrics = run / "metrics.jsonl"
    number = len(metrics.read_text().splitlines()) + 1
    with metrics.open("a") as file:
        file.write(damage)
    assert main(["report", str(run)]) == 0
    said = f"{metrics}, line {number}: {why}: restore the file, or "
    assert capsys.readouterr().err.startswith(f"note: metrics.jsonl cannot be read: {said}")
    assert main(["plot", str(run), "--out", str(run / "new.png")]) == 2
    assert capsys.readouterr().err.startswith(f"lather: error: {said}")


def test_a_run_in_progress_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(whole[:3]) + whole[4][:20])
    assert main(["report", str(run), "--out", str(run / "other.html")]) == 0
    assert capsys.readouterr().out == f"{run / 'other.html'}\n"
    data = data_of((run / "other.html").read_text("utf-8"))
    assert data["curves"]["step"] == [1, 2]
    assert not data["finished"]
    assert ["steps", "2 of 4"] in data["tiles"]


def test_a_long_run_is_drawn_with_every_nth_step() -> None:
    steps = [{"step": step, "loss": 3.0, "tokens": 2} for step in range(1, 2 * MOST_STEPS + 2)]
    columns = curves(steps)
    assert columns["step"] == list(range(1, 2 * MOST_STEPS + 2, 3))
    assert columns["tokens"][1] == 8
    assert len(columns["smoothed"]) == len(columns["step"])


def test_facts_name_schedules_of_kinds_and_a_batch_that_grows(
    make_config: Callable[..., Config],
) -> None:
    growth = {"batch_size": 6, "first_batch_size": 2, "batch_growth_steps": 3}
    rest = {"schedule": "1-sqrt", "warmup_steps": 0.5}
    facts = dict(facts_of(make_config(train=growth, optim={"rest": rest}).resolved()))
    assert facts["batch"] == "2 to 6 sequences, in the first 3 steps"
    schedules = {name: text for name, text in facts.items() if name.startswith("schedule")}
    assert schedules == {
        "schedule": "linear, 2 steps of warm-up",
        "schedule of router": "1-sqrt, 2 steps of warm-up",
        "schedule of rest": "1-sqrt, 2 steps of warm-up",
    }
    assert "batch" not in dict(facts_of(make_config()))


def test_the_top_names_the_run_and_each_start(run: Path, config: Config) -> None:
    base = {"lather": "1", "commit": None, "python": "3.11", "machine": "x86_64", "cuda": None}
    first = {**START, **base, "torch": "2.13.0"}
    second = {**first, "step": 4, "ranks": "2 ranks: 2 pipeline", "threads": 2, "torch": "2.12.0"}
    record = {"data": [["books", "abc"]], **base, "threads": 1, "starts": [first, second]}
    (run / "provenance.json").write_text(json.dumps(record))
    data = data_of(page_of(run))
    facts = dict(data["facts"])
    trained = trained_parameters(config.resolved()).num_parameters
    assert facts["model"].startswith(
        f"deepseek_v2, {trained:,} parameters, of which a token meets "
    )
    assert facts["rule and peak rates"] == config.resolved().optim.describe_rates()
    assert facts["schedule"] == "linear, 2 steps of warm-up"
    assert facts["step"] == "4 sequences of 16 tokens, 64 tokens, in fp32"
    assert data["starts"] == [
        ["when", "from step", "ranks", "device", "threads", "torch"],
        ["then", "0", "1 rank", "cpu", "1", "2.13.0"],
        ["then", "4", "2 ranks: 2 pipeline", "cpu", "2", "2.12.0"],
    ]
    assert "starts" not in dict(data["machine"])
    tiles = dict(data["tiles"])
    assert tiles["time"] == "600 ms"
    assert (tiles["MFU"], tiles["epochs"]) == ("25.0% (median)", "1.50")


def test_rows_of_an_earlier_version_are_reported(run: Path) -> None:
    """They have neither MFU nor epochs."""
    path = run / "metrics.jsonl"
    rows = read_rows(path)
    for row in rows:
        for key in ("total_tokens", "epoch", "mfu", "seconds_left"):
            row.pop(key, None)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiles = dict(data_of(page_of(run))["tiles"])
    assert tiles["time"] == "600 ms"
    assert not {"MFU", "epochs"} & set(tiles)


def test_a_token_meets_only_the_experts_that_it_chooses(config: Config) -> None:
    model = outline(config)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts
    idle = sum(
        p[0].numel() * (len(p) - config.model.num_experts_per_tok)
        for module in experts
        for p in module.parameters()
    )
    assert active_parameters(config) == sum(p.numel() for p in model.parameters()) - idle
