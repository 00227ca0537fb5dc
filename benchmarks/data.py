"""`lather bench data`: measures how fast data sets are made, how much memory making and reading
them takes, and how long the loader takes.

throughput    making shards from JSONL, against `tokenizers` alone encoding the same texts from
memory on all cores; rounds alternate memory        for many small documents and for few: the most
              memory that the processes hold together while they make the data set, the memory of a
              process that reads batches of it, and the time to open it
loader        the time of a batch of the quickstart's size, against the time of a quickstart step
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import Row, RowFile, environment
from lather.console import command_console, titled_table
from lather.data.config import DataConfig
from lather.data.dataset import DataSet
from lather.data.documents import load_tokenizer, train_tokenizer
from lather.data.making import make_dataset
from lather.data.opening import open_datasets, training_batches
from lather.data.recipe import END_OF_TEXT, DataRecipe

VOCABULARY = 8192
MIB = 1 << 20


FEW = 10_000
"""Documents with which those of the memory case are compared."""


@dataclass(frozen=True)
class DataBenchmark:
    """Measures how fast data sets are made and read, and in how much memory."""

    out: Path = Path("benchmarks/results")
    """Folder for data-cpu.jsonl; a run replaces it."""
    megabytes: int = 64
    """Text of the throughput case, in MB."""
    rounds: int = 5
    """Rounds of the throughput case, after one that warms up."""
    documents: int = 10_000_000
    """Documents of the memory case, against 10,000."""
    batches: int = 2_000
    """Batches that are read in the memory case."""
    step_ms: float = 480.0
    """The time of a quickstart step, in ms, with which the loader's time is compared."""


def run(options: DataBenchmark) -> int:
    """Measure all cases; returns the exit status."""
    file, common = (
        RowFile(options.out / "data-cpu.jsonl"),
        environment(torch.device("cpu"), ("tokenizers",)),
    )
    table = titled_table("", ["case"])
    for name in ("value", "against", "target"):
        table.add_column(name)
    with tempfile.TemporaryDirectory(prefix="lather-bench-") as temporary:
        for row, line in (
            throughput(Path(temporary), options),
            *memory(Path(temporary), options),
            loader(Path(temporary), options),
        ):
            file.write([{**common, "benchmark": "data", **row}])
            table.add_row(*line)
    file.finish()
    console = command_console()
    console.print(table)
    console.print(f"rows {file.path}", highlight=False)
    return 0


Result = tuple[Row, tuple[str, str, str, str]]


# --- throughput -----------------------------------------------------------------------------------


def throughput(folder: Path, options: DataBenchmark) -> Result:
    """Make a data set from the standard library's files, over and over, one document per line."""
    texts = _texts(options.megabytes * 10**6)
    source, tokenizer_file = folder / "texts.jsonl", folder / "tokenizer.json"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    train_tokenizer(iter(texts[:600]), VOCABULARY, END_OF_TEXT).save(str(tokenizer_file))
    tokenizer = load_tokenizer(tokenizer_file, "")
    recipe = DataRecipe((str(source),), tokenizer=str(tokenizer_file), holdout_every=0)
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(options.rounds + 1):
        begun = time.perf_counter()
        for start in range(0, len(texts), 1000):
            tokenizer.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False)
        middle = time.perf_counter()
        make_dataset(folder / "made", recipe, lambda note: None)
        end = time.perf_counter()
        shutil.rmtree(folder / "made")
        if number:
            theirs.append(middle - begun)
            ours.append(end - middle)
    ratios = sorted(their / our for their, our in zip(theirs, ours, strict=True))
    ratio = statistics.median(ratios)
    rate = options.megabytes / statistics.median(ours)
    row = {
        "case": "throughput",
        "megabytes": options.megabytes,
        "seconds": ours,
        "tokenizers_seconds": theirs,
        "of_tokenizers": ratio,
    }
    return row, (
        "JSONL to shards",
        f"{rate:.1f} MB/s",
        f"{100 * ratio:.0f} % of tokenizers alone ({100 * ratios[0]:.0f} to "
        f"{100 * ratios[-1]:.0f})",
        "90 %",
    )


def _texts(size: int) -> list[str]:
    from lather.data.sources import list_files

    recipe = DataRecipe(("python-stdlib",), pattern="*.py", format="text")
    files = itertools.cycle(list_files("python-stdlib", recipe).files)
    found: list[str] = []
    total = 0
    while total < size:
        found.append(Path(next(files).path).read_text("utf-8", errors="replace"))
        total += len(found[-1])
    return found


# --- memory ---------------------------------------------------------------------------------------


def memory(folder: Path, options: DataBenchmark) -> Iterator[Result]:
    """Make and read data sets of documents of a few words each."""
    tokenizer_file = folder / "tokenizer.json"
    found: dict[int, tuple[float, float, float]] = {}
    for count in (FEW, options.documents):
        source, made = folder / f"{count}.jsonl", folder / f"set-{count}"
        draw = random.Random(0)
        with source.open("w") as file:
            for number in range(count):
                file.write(f'{{"text": "document {number} of {count}: {draw.random()}"}}\n')
        arguments = ["data", "make", str(made), str(source), "--tokenizer", str(tokenizer_file)]
        making = _peak_mib([sys.executable, "-m", "lather", *arguments])
        source.unlink()
        reading = _peak_mib([sys.executable, "-c", READER, str(made), str(options.batches)])
        begun = time.perf_counter()
        DataSet(made).split("train")
        found[count] = making, reading, time.perf_counter() - begun
    few, many = found[FEW], found[options.documents]
    for name, index in (("making", 0), ("reading", 1)):
        row = {
            "case": f"memory of {name}",
            "documents": options.documents,
            "batches": options.batches,
            "mib": many[index],
            "mib_of_10_000": few[index],
        }
        yield (
            row,
            (
                f"memory of {name}",
                f"{many[index]:,.0f} MiB",
                f"{many[index] - few[index]:+,.0f} MiB against 10,000 documents",
                "300 MB",
            ),
        )
    row = {
        "case": "opening",
        "documents": options.documents,
        "seconds": many[2],
        "seconds_of_10_000": few[2],
    }
    yield (
        row,
        (
            "opening",
            f"{1e3 * many[2]:.1f} ms",
            f"{1e3 * few[2]:.1f} ms with 10,000 documents",
            "1 s",
        ),
    )


READER = """
import sys
from lather.data.config import DataConfig
from lather.data.opening import open_datasets, training_batches
config = DataConfig(path=(sys.argv[1],))
batches = training_batches(open_datasets(config, 8192, print), config, 128, 64, 0)
for step in range(1, int(sys.argv[2]) + 1):
    batches.batch(step)
"""


def _peak_mib(command: list[str]) -> float:
    """Run the command; returns the most memory that its processes held together, in MiB."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            peak[0] = max(peak[0], sum(_resident_mib(pid) for pid in _family(process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    ended.set()
    watcher.join()
    if status:
        raise RuntimeError(f"{command} ended with status {status}")
    return peak[0]


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _resident_mib(pid: int) -> float:
    try:
        return (
            int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / MIB
        )
    except (OSError, IndexError):
        return 0.0


# --- loader ---------------------------------------------------------------------------------------


def loader(folder: Path, options: DataBenchmark) -> Result:
    """Time the quickstart's batches: 16 sequences of 128 tokens."""
    config = DataConfig(path=(str(folder / f"set-{options.documents}"),))
    batches = training_batches(
        open_datasets(config, VOCABULARY, lambda text: None), config, 128, 16, 0
    )
    times = []
    for step in range(1, 301):
        begun = time.perf_counter()
        batches.batch(step)
        times.append(1e3 * (time.perf_counter() - begun))
    median = statistics.median(times)
    row = {"case": "loader", "ms": median, "step_ms": options.step_ms}
    return row, (
        "loader",
        f"{median:.2f} ms a batch",
        f"{100 * median / options.step_ms:.2f} % of a step of {options.step_ms:.0f} ms",
        "1 %",
    )
