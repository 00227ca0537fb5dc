"""The ledger of live bytes: births, sizes and deaths of storages, and its timeline."""

import numpy as np
import torch
from torch import Tensor, nn

from lather.memory.ledger import Ledger


def test_a_ledger_follows_births_sizes_and_deaths() -> None:
    ledger = Ledger()
    with ledger.following_sizes():
        ledger.mark("one")
        x = torch.empty(100, dtype=torch.uint8)
        ledger.note([x])
        y = torch.empty(10, dtype=torch.uint8)
        ledger.note([y, y[2:]])
        ledger.label("parameters", [y])
        assert sum(record.size for record in ledger.records) == 110
        x.untyped_storage().resize_(0)
        ledger.mark("two")
        z = torch.empty(50, dtype=torch.uint8)
        ledger.note([z])
        ledger.settle("activations")
        del z
        ledger.note([y])
    timeline = ledger.timeline()
    assert timeline.total.tolist() == [0, 100, 110, 60, 10]
    assert (timeline.peak, timeline.peak_time, timeline.doing_at(2), timeline.doing_at(3)) == (
        110,
        2,
        "two",
        "two",
    )
    assert timeline.at(2) == {"parameters": 10, "temporaries": 100}
    assert timeline.segments_at(3) == {"between segments": 50}
    assert ledger.timeline(3).total.tolist() == [60, 10]


def test_a_thinned_timeline_keeps_its_peak() -> None:
    ledger = Ledger()
    kept: list[Tensor] = []
    for number in range(1000):
        kept = [torch.empty(1000 if number == 617 else number % 7, dtype=torch.uint8)]
        ledger.note(kept)
    timeline = ledger.timeline()
    thin = timeline.thinned(50)
    assert thin.curves.shape[1] == 50
    assert thin.peak == timeline.peak
    assert np.all(np.isin(thin.total, timeline.total))


def test_sizes_are_followed_only_inside() -> None:
    before = torch.UntypedStorage.resize_
    ledger = Ledger()
    with ledger.following_sizes():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before
    nn.Linear(2, 2).weight.untyped_storage().resize_(0)
