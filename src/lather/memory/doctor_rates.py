"""Reads the rates that `lather doctor --json FILE` has measured, for `lather plan --rates FILE`."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lather.errors import ConfigError, require
from lather.files import read_text
from lather.memory.workers import Device
from lather.time_model.measured import MeasuredRates, slowest, table_of
from lather.time_model.rates import RateTable


def doctor_rates(file: Path, device: Device) -> RateTable:
    """Return the table that follows from the rates of the slowest rank in the file, with the
    slowest link of an all-to-all of large messages, if links were measured.

    Raises ConfigError if the file has no rates, or those of another kind than `device`.
    """
    try:
        found = _json(file)
        ranks, links = found["ranks"], found["links"]
        measured = slowest([MeasuredRates.of_json(rank["rates"]) for rank in ranks])
        exchange = _exchange(links)
        where = _where(str(found["day"]), {rank["host"] for rank in ranks}, ranks[0]["versions"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        raise ConfigError(
            f"--rates = {str(file)!r}: it has no rates that lather doctor has measured: make it "
            f"again with lather doctor --json {file}"
        ) from None
    kind = "cpu" if measured.is_cpu else "gpu"
    require(
        kind == device,
        "--rates",
        str(file),
        f"rates of a {device.upper()}, with --device {device}: give --device {kind}",
    )
    return table_of(measured, exchange, where)


def _json(file: Path) -> Any:
    try:
        return json.loads(read_text(file))
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply") from None


def _exchange(links: Sequence[dict[str, Any]]) -> float | None:
    """Return the bytes per second that a rank sends in the largest all-to-all."""
    measured = [link for link in links if link["operation"] == "all-to-all"]
    if not measured:
        return None
    largest = max(measured, key=lambda link: float(link["num_bytes"]))
    rate = float(largest["sent"]) / float(largest["seconds"])
    if not 0 < rate < math.inf:
        raise ValueError(f"{rate} is no rate of an exchange")
    return rate


def _where(day: str, hosts: set[str], versions: dict[str, str]) -> str:
    """Return where and when rates were measured, and what is not as it is here and now."""
    place = "this machine" if hosts == {socket.gethostname()} else f"another machine, {min(hosts)}"
    if len(hosts) > 1:
        place = f"{len(hosts)} machines"
    other = "" if versions["torch"] == torch.__version__ else f", with torch {versions['torch']}"
    return f"{place}, {day}{other}"
