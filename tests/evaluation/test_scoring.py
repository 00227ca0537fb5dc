"""Scores of labels against the logits of all positions, and a held-out set against the engine's
validation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lather.data.batches import Batch, Source
from lather.data.sequences import IGNORE_INDEX, SequenceArrays
from lather.evaluation import scoring
from lather.evaluation.scoring import Score, score_head, score_set, states_of
from models.tiny import error, random_tokens, tiny_family_model


def batch_of(model_type: str, *, packed: bool) -> Batch:
    tokens_BS = random_tokens(3, 10)
    labels_BS = tokens_BS[:, 1:].clone()
    labels_BS[0, :4], labels_BS[2, 5:] = IGNORE_INDEX, IGNORE_INDEX
    begins_BS = torch.zeros(3, 9, dtype=torch.bool)
    begins_BS[1, 4] = True
    return Batch(tokens_BS[:, :-1], labels_BS, begins_BS if packed else None)


@torch.no_grad()
@pytest.mark.parametrize("logits_at_a_time", [37 * 4, 1 << 24])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "gpt_oss"])
def test_scores_are_those_of_all_logits(
    model_type: str, packed: bool, logits_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "LOGITS_AT_A_TIME", logits_at_a_time)
    model, batch = tiny_family_model(model_type).double(), batch_of(model_type, packed=packed)
    boundaries = torch.tensor([0, 9, 13, 18, 27]) if packed else None
    logits = model(batch.inputs_BS, cu_seqlens=boundaries).logits_BSV
    expected = F.cross_entropy(
        logits.flatten(0, 1), batch.labels_BS.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    is_label = batch.labels_BS.flatten() != IGNORE_INDEX
    ((_, x_BSD),) = states_of(model, [batch])
    nats_N, hits_N = score_head(x_BSD, batch.labels_BS, model.lm_head.weight)
    assert nats_N.dtype == torch.float64
    assert error(nats_N, expected[is_label]) < 1e-12
    assert torch.equal(hits_N, (logits.argmax(-1) == batch.labels_BS).flatten()[is_label])
    assert (
        error(model(batch.inputs_BS, batch.labels_BS, cu_seqlens=boundaries).loss, nats_N.sum())
        < 1e-12
    )


class Numbered:
    """Sequences that are drawn with their number as seed; nothing of sequence 3 is learned."""

    length, is_per_document = 6, False
    columns: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __len__(self) -> int:
        return 5

    def num_tokens(self, index: int) -> int:
        return self.length

    def num_labels(self, index: int) -> int | None:
        return None

    def fill(self, index: int, to: SequenceArrays) -> None:
        tokens = np.random.default_rng(index).integers(0, 37, 7)
        to.inputs_S[:], to.labels_S[:] = tokens[:-1], tokens[1:]
        if index == 3:
            to.labels_S[:] = IGNORE_INDEX


@pytest.mark.parametrize("batch_size", [1, 2, 5, 9])
def test_a_set_is_the_sum_of_its_sequences_whatever_the_batches(batch_size: int) -> None:
    model, source = tiny_family_model("qwen3_moe").double(), Source("numbered", Numbered(), 37)
    bytes_V, told = torch.arange(37), []
    whole = score_set(model, source, range(5), batch_size, bytes_V=bytes_V, progress=told.append)
    parts = [score_set(model, source, [index], 1, bytes_V=bytes_V) for index in range(5)]
    assert (whole.sequences, whole.tokens, parts[3].tokens) == (5, 24, 0)
    assert whole.nats == pytest.approx(sum(part.nats for part in parts), rel=1e-12)
    assert whole.hits == sum(part.hits for part in parts)
    assert whole.num_bytes == sum(part.num_bytes or 0 for part in parts) > 100
    assert told[-1] == 5
    assert score_set(model, source, range(5), 2, bytes_V=None).num_bytes is None


def test_what_the_numbers_mean() -> None:
    row = Score(sequences=2, tokens=8, nats=8 * math.log(4), hits=2, num_bytes=32).as_row()
    assert row["loss"] == pytest.approx(math.log(4))
    assert row["perplexity"] == pytest.approx(4)
    assert row["bits_per_byte"] == pytest.approx(0.5), "two bits per token of four bytes"
    assert row["accuracy"] == 0.25
    nothing = Score(sequences=3, tokens=0, nats=0.0, hits=0, num_bytes=0).as_row()
    unknown = dict.fromkeys(("loss", "perplexity", "bits_per_byte", "accuracy"))
    assert nothing == {"sequences": 3, "tokens": 0, "bytes": 0, **unknown}
    assert Score(1, 1, 1e4, 0, 0).as_row() | {"loss": 1} == {
        **unknown,
        "sequences": 1,
        "tokens": 1,
        "bytes": 0,
        "loss": 1,
        "accuracy": 0.0,
    }
