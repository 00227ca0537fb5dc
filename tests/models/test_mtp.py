"""Multi-token prediction against the paper's formulas, in fp64: losses and every gradient, with
packed documents, padding and labels that are left out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from lather.models.decoder import Decoder
from lather.models.families import build_model
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.models.mtp import look_ahead
from models.mtp_paper import Span, paper_losses
from models.tiny import SIZES, error, gradients

ENDS = [[1, 4, 5, 9], [2, 8]]
"""Ends of the documents of two sequences of 9 positions; the second has padding behind."""
DOCUMENTS = [
    (row, start, stop)
    for row, ends in enumerate(ENDS)
    for start, stop in zip([0, *ends], ends, strict=False)
]


@dataclass(frozen=True)
class MtpConfig(DeepseekV2Config):
    """A model of DeepSeek-V2's blocks with multi-token prediction."""

    num_nextn_predict_layers: int = 2


def mtp_model(**changes: int) -> Decoder:
    """Build a model in fp64 with norm weights other than 1."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(MtpConfig(**{**SIZES, **changes}), generator).double()
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5, generator=generator)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Draw tokens and labels, a third of which are left out."""
    generator = torch.Generator().manual_seed(1)
    tokens_BS = torch.randint(SIZES["vocab_size"], (2, 10), generator=generator)
    left_out_BS = torch.rand(2, 9, generator=generator) < 1 / 3
    return tokens_BS[:, :-1], tokens_BS[:, 1:].masked_fill(left_out_BS, -100)


@pytest.mark.parametrize("memory", ["saved", "recompute", "reference"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_losses_and_gradients_are_the_papers(memory: str, is_packed: bool) -> None:
    model, plain = mtp_model(), mtp_model()
    plain.set_memory("reference")
    model.set_memory(memory)
    tokens_BS, labels_BS = batch()
    documents: list[Span] = [(0, 0, 9), (1, 0, 9)]
    cu_seqlens = padding_BS = None
    if is_packed:
        documents = DOCUMENTS
        cu_seqlens = torch.tensor([0, *ENDS[0], *(9 + end for end in ENDS[1]), 18])
        padding_BS = torch.zeros(2, 9, dtype=torch.bool)
        padding_BS[1, 8] = True
        labels_BS[1, 8] = -100
    expected = paper_losses(plain, tokens_BS, labels_BS, documents)
    expected.total(0.3).backward()

    output = model(tokens_BS, labels_BS, cu_seqlens=cu_seqlens, padding_BS=padding_BS)
    assert output.loss is not None
    found = [output.loss, *output.mtp_losses]
    means = [loss / number for loss, number in zip(found, expected.numbers, strict=True)]
    (means[0] + 0.3 / 2 * (means[1] + means[2])).backward()
    for loss, total in zip(found, expected.sums, strict=True):
        assert error(loss, total) < 1e-13
    for (name, gradient), other in zip(
        gradients(model).items(), gradients(plain).values(), strict=True
    ):
        assert error(gradient, other) < 1e-12, name
    chosen = SIZES["num_experts_per_tok"]
    rows = [int(routing.count_E.sum()) // chosen for routing in output.routings]
    assert rows[-2:] == expected.rows[1:]


def test_evaluation_and_logits_are_those_of_the_main_model() -> None:
    model = mtp_model()
    main = build_model(DeepseekV2Config(**SIZES)).double()
    main.load_state_dict(model.state_dict(), strict=False)
    tokens_BS, labels_BS = batch()
    assert torch.equal(model(tokens_BS).logits_BSV, main(tokens_BS).logits_BSV)
    model.eval()
    output = model(tokens_BS, labels_BS)
    assert torch.equal(output.loss, main(tokens_BS, labels_BS).loss)
    assert not output.mtp_losses


def test_a_depth_sees_nothing_behind_its_document() -> None:
    tokens_BS, labels_BS = torch.arange(6)[None], torch.arange(1, 7)[None]
    documents_BS = torch.tensor([[0, 0, 0, 1, 1, 2]])
    padding_BS = torch.tensor([[False] * 5 + [True]])
    later_BS, later_labels_BS, missing_BS = look_ahead(
        tokens_BS, labels_BS, 1, documents_BS, padding_BS
    )
    assert later_BS[~missing_BS].tolist() == [1, 2, 4]
    assert later_labels_BS.tolist() == [[2, 3, -100, 5, -100, -100]]
    assert look_ahead(tokens_BS, labels_BS, 8)[2].all()
