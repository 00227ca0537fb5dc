"""Emulates on a CPU how a GPU's tensor cores round the optimizer's products, and measures what that
does to an update and to the loss.

    python -m benchmarks.roundings updates [--rules soap klsoap soap_muon]      error of single
        updates, on gradients of the quickstart
    python -m benchmarks.roundings losses [--rules ...] [--seeds 0 1 2] [--only base projections]
        the quickstart's loss with them

As in tensor cores, operands are rounded and sums are fp32. The roundings are tf32, to the nearest
number with 10 bits of mantissa; tf32_cut, which cuts the other bits off; bf16x3, three products of
bf16 in place of one; and bf16. The phases are projections into the bases and out of them,
statistics (with whitening), Newton-Schulz, and refreshes, which are done as on a GPU: first bases
by iteration, later ones by the root. Factorisations stay in fp32.

Rows are added to benchmarks/results/roundings-cpu.jsonl; rows that are there are not made again.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.convergence.training import Silent
from benchmarks.report import environment
from lather.config.config import Config
from lather.config.toml_file import config_from_mapping
from lather.engine.optimizer import build_optimizer
from lather.files import read_rows
from lather.optim import MatrixOptimizer
from lather.optim.rules import bases, kl_soap, muon, soap, soap_muon
from lather.train.loop import train

REPOSITORY = Path(__file__).parents[1]
STEPS = 150
SNAPSHOTS = (20, 60, 140)
"""Steps whose updates are compared, and the updates of the step after each. The first of such two
steps refreshes all bases."""
RULES = ("soap", "klsoap", "soap_muon")

PHASES: dict[str, tuple[tuple[Any, str], ...]] = {
    "projections": ((soap, "precondition"), (kl_soap, "precondition"), (soap_muon, "precondition")),
    "statistics": (
        (soap, "update_kronecker_factors"),
        (kl_soap, "update_kronecker_factors_kl"),
        (soap_muon, "update_kronecker_factors"),
    ),
    "refresh": ((bases, "update_eigenbasis_and_momentum"),),
    "newton_schulz": ((muon, "orthogonalize"),),
}
"""For each phase the functions whose products belong to it, and the modules in which rules find
them."""

Products = Mapping[str, str]
"""The rounding of each phase's products."""

CONTESTANTS: dict[str, Products] = {
    "base": {},
    "projections": {"projections": "tf32"},
    "statistics": {"statistics": "tf32"},
    "refresh": {"refresh": "tf32"},
    "newton_schulz": {"newton_schulz": "bf16"},
    "all": {
        "projections": "tf32",
        "statistics": "tf32",
        "refresh": "tf32",
        "newton_schulz": "bf16",
    },
}
"""The roundings whose losses are compared."""

UPDATES: dict[str, Products] = {
    **{
        f"{phase} {rounding}": {phase: rounding}
        for phase in PHASES
        for rounding in ("tf32", "tf32_cut", "bf16x3", "bf16")
    },
    "all tf32, newton_schulz bf16": CONTESTANTS["all"],
}
"""The roundings whose updates are compared. Beside them stand gradients that are rounded to bf16,
with all products in fp32."""


def rounded(x: Tensor, rounding: str) -> Tensor:
    """Round x, in fp32, to the bits that the rounding leaves of it."""
    if rounding == "bf16":
        return x.bfloat16().float()
    bits = x.view(torch.int32)
    return ((bits + (0x1000 if rounding == "tf32" else 0)) & ~0x1FFF).view(torch.float32)


class RoundedProducts(TorchDispatchMode):
    """Rounds the operands of products of fp32 matrices, inside the block."""

    def __init__(self, rounding: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding = rounding

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name.partition("::")[2].rstrip("_")
        if name not in ("mm", "bmm", "addmm", "baddbmm") or args[-1].dtype != torch.float32:
            return func(*args, **kwargs)
        *added, a, b = args
        if self.rounding != "bf16x3":
            return func(*added, rounded(a, self.rounding), rounded(b, self.rounding), **kwargs)
        (a1, a2), (b1, b2) = (
            (high, rounded(x - high, "bf16")) for x in (a, b) for high in [rounded(x, "bf16")]
        )
        out = func(*added, a1, b1, **kwargs)
        return out.add_(torch.matmul(a1, b2) + torch.matmul(a2, b1), alpha=kwargs.get("alpha", 1))


@contextmanager
def products(chosen: Products) -> Iterator[None]:
    """Round the products of the chosen phases, inside the block."""
    with ExitStack() as stack:
        for phase, rounding in chosen.items():
            for module, name in PHASES[phase]:
                function = getattr(module, name)
                is_option = (phase, rounding) == ("newton_schulz", "bf16")
                other = (
                    _in_bf16(function)
                    if is_option
                    else _inside(RoundedProducts(rounding), function)
                )
                stack.enter_context(patch.object(module, name, other))
        yield


def _inside(mode: RoundedProducts, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


def _in_bf16(orthogonalize: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the iteration keep everything in bf16, as `newton_schulz_dtype` does, and not round its
    operands alone."""
    return lambda x, steps, coefficients, dtype: orthogonalize(x, steps, coefficients, "bfloat16")


def config_of(rule: str, seed: int, folder: Path, steps: int = STEPS) -> Config:
    """Make the configuration of the quickstart, cut short, with bases as on a GPU."""
    mapping = tomllib.loads((REPOSITORY / "configs/quickstart.toml").read_text())
    as_on_a_gpu = {"first_bases": "iteration", "refresh_method": "root_qr"}
    every = {"precondition_frequency": 10, "stagger_refresh": False}
    fp32 = {"newton_schulz_dtype": "float32"} if rule == "soap_muon" else {}
    mapping["optim"] = {"name": rule, "warmup_steps": 15, **as_on_a_gpu, **every, **fp32}
    mapping["optim"]["rest"] = {
        "rule": "embedding_soap",
        "lr_factor": 3.0,
        "precondition_frequency": 1,
    }
    mapping["train"] |= {"steps": steps, "validation_every": 0, "device": "cpu"}
    mapping |= {
        "run_dir": str(folder),
        "seed": seed,
        "checkpoint": {"every": 10 * steps},
        "log": {"sample_tokens": 0, "picture": False},
    }
    return config_from_mapping(mapping)


# --- losses ---------------------------------------------------------------------------------------


def loss_row(rule: str, contestant: str, seed: int, steps: int) -> dict[str, Any]:
    """Train, and return a row with the loss at the end."""
    folder = Path(tempfile.mkdtemp())
    try:
        with products(CONTESTANTS[contestant]):
            outcome = train(config_of(rule, seed, folder, steps), Silent())
        found = [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]
        return {
            "validation_loss": outcome.validation_losses[-1],
            "training_loss": statistics.mean(found[-20:]),
        }
    finally:
        shutil.rmtree(folder)


# --- updates --------------------------------------------------------------------------------------


@dataclass
class Snapshot:
    """The state before a step, and the gradients of this step and of the next."""

    names: list[str]
    state: dict[str, Any]
    gradients: list[list[Tensor]] = field(default_factory=list)


def snapshots(config: Config, steps: Sequence[int]) -> dict[int, Snapshot]:
    """Train, and take a snapshot before each of `steps`."""
    found: dict[int, Snapshot] = {}
    count = 0

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal count
        count += 1
        if not isinstance(optimizer, MatrixOptimizer) or not {count, count - 1} & set(steps):
            return
        if count in steps:
            names = [name for group in optimizer.param_groups for name in group["param_names"]]
            found[count] = Snapshot(names, copy.deepcopy(optimizer.state_dict()))
        gradients = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
        for step in {count, count - 1} & set(steps):
            found[step].gradients.append(gradients)

    handle = register_optimizer_step_pre_hook(look)
    try:
        train(config, Silent())
    finally:
        handle.remove()
    return found


def updates_after(
    snapshot: Snapshot, config: Config, rounded_gradients: bool = False
) -> list[Tensor]:
    """Take the two steps from a snapshot on weights that are zero; returns -lr U of all
    matrices."""
    named = [
        (name, nn.Parameter(torch.zeros_like(grad)))
        for name, grad in zip(snapshot.names, snapshot.gradients[0], strict=True)
    ]
    optimizer = build_optimizer(config.optim, named)
    by_name = dict(named)
    order = [by_name[name] for group in optimizer.param_groups for name in group["param_names"]]
    optimizer.load_state_dict(copy.deepcopy(snapshot.state))
    found = []
    for gradients in snapshot.gradients:
        for (_, p), grad in zip(named, gradients, strict=True):
            p.detach().zero_()
            p.grad = grad.bfloat16().float() if rounded_gradients else grad.clone()
        optimizer.step()
        found += [
            u.clone()
            for p in order
            if p.dim() > 1
            for u in (p.detach() if p.dim() == 3 else p.detach().unsqueeze(0))
        ]
    return found


def update_rows(
    rule: str, seed: int, steps: int = STEPS, at: Sequence[int] = SNAPSHOTS
) -> Iterator[dict[str, Any]]:
    """Compare updates by |U' - U| / |U| for each matrix and rounding, in the steps `at` of a run
    and in the step after each."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(rule, seed, Path(folder) / "run", steps)
        taken = snapshots(config, at)
    for step, snapshot in taken.items():
        exact = updates_after(snapshot, config)
        for name, chosen in {"gradients bf16": {}, **UPDATES}.items():
            if rule != "soap_muon" and "newton_schulz" in chosen and len(chosen) == 1:
                continue
            with products(chosen):
                found = updates_after(snapshot, config, rounded_gradients=name == "gradients bf16")
            half = len(found) // 2
            errors = [
                float((u - e).norm() / e.norm())
                for u, e in zip(found, exact, strict=True)
                if e.norm() > 0
            ]
            for what, some in (("step", errors[:half]), ("step after", errors[half:])):
                yield {
                    "step": step,
                    "products": name,
                    "update": what,
                    "median": statistics.median(some),
                    "largest": max(some),
                }


# --- rows -----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("updates", "losses"))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=tuple(CONTESTANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "benchmarks/results/roundings-cpu.jsonl"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    common = environment(torch.device("cpu"), ())
    there = (
        [json.loads(line) for line in options.out.read_text().splitlines()]
        if options.out.exists()
        else []
    )
    done = {
        tuple(row.get(key) for key in ("benchmark", "rule", "products", "seed")) for row in there
    }

    def keep(row: dict[str, Any]) -> None:
        with options.out.open("a") as file:
            file.write(json.dumps({**common, **row}) + "\n")
        print(json.dumps(row), flush=True)

    if options.what == "updates":
        for rule in options.rules:
            if ("rounded updates", rule, "gradients bf16", options.seeds[0]) not in done:
                for row in update_rows(rule, options.seeds[0]):
                    keep(
                        {
                            "benchmark": "rounded updates",
                            "rule": rule,
                            "seed": options.seeds[0],
                            **row,
                        }
                    )
        return
    for seed in options.seeds:
        for rule in options.rules:
            for name in options.only:
                is_asked = rule == "soap_muon" or name != "newton_schulz"
                if is_asked and ("rounded losses", rule, name, seed) not in done:
                    row = {
                        "benchmark": "rounded losses",
                        "rule": rule,
                        "products": name,
                        "seed": seed,
                        "steps": options.steps,
                    }
                    keep({**row, **loss_row(rule, name, seed, options.steps)})


if __name__ == "__main__":
    main()
