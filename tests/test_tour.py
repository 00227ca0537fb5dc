"""docs/tour.md shows the output of the run that benchmarks/results has the row of."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_training_that_the_tour_shows_is_that_of_the_row() -> None:
    rows = map(json.loads, (ROOT / "benchmarks/results/quickstart.jsonl").read_text().splitlines())
    row = next(row for row in rows if row["contestant"] == "muon")
    block = re.search(r"^lather train configs/quickstart.toml\n```.*?```text\n(.*?)^```$", (ROOT / "docs/tour.md").read_text(), re.M | re.S)
    assert block
    shown = [(int(step), loss) for step, loss in re.findall(r"^step (\d+): validation loss ([\d.]+)$", block[1], re.MULTILINE)]
    assert shown == [(step, f"{loss:.4f}") for step, loss in row["validation"]]
    last = f"{row['first_loss']:.4f} before, {row['loss']:.4f} after {row['steps']} steps in {row['seconds']:.0f} s of training"
    assert f"validation loss   {last}\n" in block[1]
