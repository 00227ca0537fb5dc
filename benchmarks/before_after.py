"""Step times of two checkouts of this repository, on the sets of `lather bench optimizer`.

    python -m benchmarks.before_after OLD/src NEW/src [--sets many_small big] [--frequencies 1 10]
    [--rounds 5] [--out FILE]

Rounds alternate between the two. Each round is a process of its own that warms up, does whole
intervals of steps and gives their median; the row of a case has the median over rounds of the ratio
of new to old. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
"""The checkout whose `benchmarks` measure both."""
SETS = ("many_small", "experts", "experts_3d", "wide", "big")

ROUND = """
import sys, time, torch
from benchmarks.contestants import OURS, SETS, gradient_pool, make_contestant
matrices, frequency, seconds = SETS[sys.argv[1]], int(sys.argv[2]), float(sys.argv[3])
one = make_contestant(OURS, matrices, frequency, gradient_pool(matrices, torch.device("cpu")))
def interval():
    start = time.perf_counter()
    for _ in range(frequency):
        one.set_gradients()
        one.step()
    return (time.perf_counter() - start) / frequency
for _ in range(2 if frequency > 1 else 3):
    interval()
times, end = [], time.perf_counter() + seconds
while time.perf_counter() < end or len(times) < 3:
    times.append(interval())
print(1e3 * sorted(times)[len(times) // 2])
"""


def step_ms(source: str, name: str, frequency: int, seconds: float) -> float:
    """Measure one round; returns milliseconds per step."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(REPOSITORY)])}
    command = [sys.executable, "-c", ROUND, name, str(frequency), str(seconds)]
    return float(
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--frequencies", nargs="+", type=int, default=[1, 10])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round, at least")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/before-after-cpu.jsonl")
    )
    options = parser.parse_args()
    with options.out.open("w") as file:
        for name in options.sets:
            for frequency in options.frequencies:
                rounds = [
                    [
                        step_ms(source, name, frequency, options.seconds)
                        for source in (options.old, options.new)
                    ]
                    for _ in range(options.rounds)
                ]
                ratios = [new / old for old, new in rounds]
                row = {
                    "benchmark": "before_after",
                    "config": {"set": name, "frequency": frequency, "rounds": options.rounds},
                    "commits": [_commit(source) for source in (options.old, options.new)],
                    "old_ms": statistics.median(old for old, _ in rounds),
                    "new_ms": statistics.median(new for _, new in rounds),
                    "ratio": statistics.median(ratios),
                    "ratios": sorted(ratios),
                }
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(
                    f"{name:>11} every {frequency:>2}: {row['old_ms']:8.2f} -> "
                    f"{row['new_ms']:8.2f} ms, ratio {row['ratio']:.3f}",
                    flush=True,
                )


def _commit(source: str) -> str:
    return subprocess.run(
        ["git", "-C", source, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
