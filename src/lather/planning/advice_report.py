"""Prints a table of advised settings, or the reason why nothing fits."""

from __future__ import annotations

from rich.console import Console

from lather.console import titled_table
from lather.planning.advice import EXCHANGE, FLOPS, LINK, Advice, Setting, as_options

GIB = 2**30


def show(advice: Advice, memory: int, console: Console) -> None:
    """Print the settings that fit, best first, with their prices; or the lightest setting, and the number of ranks on which it would
    fit."""
    if not advice.settings:
        _show_infeasible(advice, memory, console)
        return
    title = f"settings that fit in {memory / GIB:.2f} GiB, best first, of {advice.number_tried} tried; sizes planned"
    table = titled_table(title, ["change"], ("needs GiB", "left", "flops more", "to experts, GiB", "to other ranks", "bubble"))
    for setting, plan in advice.settings:
        sizes = (f"{plan.needed / GIB:.2f}", f"{(memory - plan.needed) / GIB:.2f}")
        table.add_row(as_options(setting.changes) or "none", *sizes, *_price(setting, advice.least_flops))
    console.print(table)
    if any("optim.name" in setting.changes for setting, _ in advice.settings):
        console.print("another rule has its own default options and rates: tune them", highlight=False)
    console.print(
        "flops and bytes of the first pipeline rank are counted; 'flops more' compares with the fewest of all settings tried; the order "
        f"assumes {FLOPS / 1e12:.0f} TFLOP/s, {EXCHANGE / 1e9:.0f} GB/s to experts and {LINK / 1e9:.0f} GB/s to others, not measured",
        highlight=False,
    )


def _price(setting: Setting, least_flops: float) -> tuple[str, ...]:
    sent = (f"{size / GIB:,.1f}" for size in (setting.work.exchanged, setting.work.sent))
    return f"{setting.work.flops / least_flops - 1:.1%}", *sent, f"{setting.bubble:.1%}"


def _show_infeasible(advice: Advice, memory: int, console: Console) -> None:
    lightest = advice.lightest
    kinds = sorted(lightest.estimate.peak.kinds.items(), key=lambda item: -item[1])[:2]
    most = " and ".join(f"{name} {size / GIB:.1f}" for name, size in kinds)
    console.print(
        f"nothing fits in {memory / GIB:.2f} GiB, of {advice.number_tried} settings tried; the lightest, "
        f"{as_options(lightest.changes) or 'without changes'}, needs about {lightest.estimate.needed / GIB:.2f} GiB, most of it {most}",
        highlight=False,
    )
    world = advice.world_that_fits
    what = "no larger world that was tried is enough" if world is None else f"the same settings would fit on {world} ranks (estimated)"
    console.print(what, highlight=False)
