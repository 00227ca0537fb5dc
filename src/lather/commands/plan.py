"""`lather plan CONFIG --world N`: predicts the memory that every rank of a training run will need,
and how long a step takes, without a GPU and before the run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console

from lather.argument import Argument
from lather.commands.parsing import check_writable, parse_size
from lather.commands.with_config import parse_with_config
from lather.config.config import Config
from lather.config.ranks import check_parallel
from lather.config.toml_file import config_to_toml
from lather.console import command_console
from lather.data.epochs import epoch_size
from lather.errors import DataError, UserError, require
from lather.files import whole_file
from lather.memory import plan_report
from lather.memory.advice import advise, as_options
from lather.memory.doctor_rates import doctor_rates
from lather.memory.plan import MemoryPlan, plan
from lather.memory.plan_picture import draw
from lather.memory.step_time import StepTime, measured_run, step_time, with_epochs
from lather.memory.workers import Assumed
from lather.time_model.rates import RATES


@dataclass(frozen=True)
class PlanArguments:
    """Run a few training steps of a rank at each pipeline position on tensors without storage, and
    show which bytes are alive at the peak, and how long a step takes."""

    config: Annotated[Config, Argument(inline=True)] = field(default_factory=Config)
    world: int = 1
    """Number of ranks of the run, on all machines."""
    memory: str = ""
    """Memory of a device, for example 80GiB: reports whether the run fits."""
    device: Literal["gpu", "cpu"] = "gpu"
    """Kind of device that the ranks have: CPU and GPU take different paths."""
    rates: str = ""
    """Rates that times are predicted from: h100, h200, a100, b200 or cpu (a core of one), or the
    file of `lather doctor --json` on such a device, or the folder of a run on it, whose measured
    steps correct them. Left out: h100 or cpu."""
    imbalance: float = 1.0
    """Rows that the experts of the busiest rank receive, relative to an even load; above 1 for
    routers that are not balanced."""
    out: Path | None = None
    """PNG file to draw to: the peaks of all pipeline ranks, and their bytes by kind during a
    step."""
    json: Path | None = None
    """JSON file to write all numbers to."""
    advice: Literal["auto", "always", "never"] = "auto"
    """Plan at most ten other settings until one fits in --memory: fewer activations, a smaller
    optimizer state, another mesh or rule. auto: if the run does not fit; always: if it fits, other
    meshes."""
    machine: int = 8
    """Devices per machine, for the memory of its host; in the advice, the ranks that share the
    experts of a layer are within a machine, and pipelines may go from machine to machine."""
    write: Path | None = None
    """TOML file to write the configuration of the first advice to."""

    def __post_init__(self) -> None:
        require(self.world >= 1, "--world", self.world, "at least 1 rank")
        require(self.imbalance > 0, "--imbalance", self.imbalance, "above 0: 1 is an even load")
        require(self.machine >= 1, "--machine", self.machine, "at least 1 device")
        if self.memory:
            parse_size(self.memory, "--memory", unit=True)
        for name, needs_it in (
            ("--write", self.write is not None),
            ("--advice always", self.advice == "always"),
        ):
            if needs_it and not self.memory:
                raise UserError(
                    f"{name} needs --memory, the memory of a device, such as --memory 80GiB"
                )


def plan_command(arguments: list[str]) -> int:
    """Make the plan, write the files that were asked for, and print the tables. Returns 1 if the
    run does not fit in the given memory."""
    parsed, name = parse_with_config(PlanArguments, "plan", arguments)
    check_writable(parsed.out, parsed.json, parsed.write)
    check_parallel(parsed.config, parsed.world, "--world")
    memory = parse_size(parsed.memory, "--memory", unit=True) if parsed.memory else None
    file, rates, run, table = Path(parsed.rates), parsed.rates, None, None
    if parsed.rates not in RATES and os.path.isfile(file):
        rates, table = "", doctor_rates(file, parsed.device)
    elif (run := measured_run(parsed.rates, parsed.device)) is not None:
        rates = run.rates
    assumed = Assumed(parsed.device, parsed.imbalance, memory, rates, table)
    with Console(stderr=True).status("planning: a minute or more for a large model"):
        result = plan(parsed.config.resolved(), parsed.world, assumed)
        time = step_time(result, parsed.machine)
        if run is not None:
            time = replace(time, scale=run.scale(plan(run.config, run.world_size, assumed)))
    time, without_data = _with_epochs(time, result)
    if parsed.json:
        plan_report.write(result, time, arguments, parsed.json)
    title = f"{name}: {parsed.world} {'rank' if parsed.world == 1 else 'ranks'}"
    if parsed.out:
        draw(result, memory, title, parsed.out)
    console = command_console()
    machine = parsed.machine
    plan_report.show(result, memory, console, machine=machine, time=time, without_data=without_data)
    fits = memory is None or result.needed <= memory
    if memory is not None and (parsed.advice == "always" or (parsed.advice == "auto" and not fits)):
        _advise(parsed, result, memory, console)
    return int(not fits)


def _with_epochs(time: StepTime, result: MemoryPlan) -> tuple[StepTime, str]:
    """Return the time with the tokens of `train.epochs`, if that is given and the data sets are
    there, and otherwise what is missing."""
    config, train = result.config, result.config.train
    if not train.epochs:
        return time, ""
    length, sizes = train.sequence_length, train.batch_sizes
    try:
        size = epoch_size(config.data, config.model.vocab_size, length, sizes)
    except DataError as error:
        return time, str(error)
    return with_epochs(time, result, size), ""


def _advise(parsed: PlanArguments, present: MemoryPlan, memory: int, console: Console) -> None:
    """Plan settings until some fit, and print them; write the configuration of the first if asked
    to."""

    def say(what: str) -> None:
        console.print(what, style="dim", highlight=False)

    advice = advise(parsed.config, present, memory, machine=parsed.machine, say=say)
    plan_report.show_advice(advice, console)
    if parsed.write and advice.fitting:
        best = advice.fitting[0]
        world, changes = best.plan.world_size, as_options(best.changes) or "as it was"
        with whole_file(parsed.write, "--write") as aside:
            comment = f"# lather plan: for {world} ranks, {changes}\n"
            aside.write_text(comment + config_to_toml(best.config), "utf-8")
        console.print(f"written: {parsed.write}", highlight=False)
