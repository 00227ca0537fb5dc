"""Stages run segment by segment against the decoder's own forward and plain autograd, bit for bit;
autocast; poison, which can fail."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lather.models.block import Attended, Block
from lather.models.decoder import Decoder
from lather.models.layers import Linear
from lather.models.moe import Dispatched, Exchange
from lather.models.routing import Routing
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from lather.models.token_positions import SequenceLayout
from lather.pipeline import overlap
from lather.pipeline.chunk import BlockTape, ChunkTape, MicroBatch, RoutingSummary
from lather.pipeline.segment_runner import RECOMPUTABLE
from lather.pipeline.segments import Segments, Steps
from lather.pipeline.tape import Cut, Frees
from models.tiny import random_tokens, tiny_family_model, whole_part

BATCH, LENGTH = 2, 7
NORMALIZER, BALANCE, Z = 13.0, 0.07, 0.03
FAMILIES = ("deepseek_v2", "qwen3_moe", "gpt_oss")


def model_of(family: str, **changes: Any) -> Decoder:
    model = tiny_family_model(family, **changes)
    for router in model.routers():
        router.takes_z_loss = True
    return model


def micro_batch(seed: int = 0) -> MicroBatch:
    tokens, labels = (
        random_tokens(BATCH, LENGTH, seed=seed),
        random_tokens(BATCH, LENGTH, seed=seed + 100),
    )
    labels[0, :3] = -100
    return MicroBatch(
        tokens, labels, SequenceLayout(BATCH, LENGTH, tokens.device), NORMALIZER, BALANCE, Z
    )


def plain_step(
    model: Decoder, batch: MicroBatch, precision: torch.dtype | None = None
) -> tuple[Tensor, list[RoutingSummary]]:
    """Compute the loss in one graph; the gradients are left in the model."""
    with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
        output = model(batch.tokens_BS, batch.labels_BS, normalizer=batch.normalizer)
    assert output.loss is not None
    (
        output.loss
        + batch.balance_weight * output.balance_loss()
        + batch.z_weight * output.z_loss()
    ).backward()
    return output.loss.detach(), [
        RoutingSummary(r.count_E, r.balance_loss.detach()) for r in output.routings
    ]


def segments_step(
    model: Decoder, segments: Segments, batch: MicroBatch, *, defer: bool = False
) -> tuple[Tensor, list[RoutingSummary], ChunkTape]:
    """Compute the same segment by segment; returns the loss and what is left of the tape."""
    (stage,) = whole_part(model).stages
    tape, routings = ChunkTape(batch), []
    (loss,) = overlap.run(segments.forward(stage, None, tape, routings))
    assert overlap.run(segments.backward(tape, None, defer=defer)) is None
    return loss, routings, tape


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(actual: nn.Module, expected: nn.Module) -> None:
    ours, theirs = gradients(actual), gradients(expected)
    assert ours.keys() == theirs.keys() == dict(expected.named_parameters()).keys()
    different = [name for name, grad in ours.items() if not torch.equal(grad, theirs[name])]
    assert not different


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [(), RECOMPUTABLE], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "frees", [Frees(), Frees(poison=True), Frees(enabled=False)], ids=["free", "poison", "hold"]
)
def test_loss_gradients_and_routing_have_the_bits_of_one_graph(
    family: str, recompute: tuple[str, ...], frees: Frees
) -> None:
    plain, model = model_of(family), model_of(family)
    for seed in (0, 1):
        expected, expected_routings = plain_step(plain, micro_batch(seed))
        loss, routings, tape = segments_step(
            model, Segments(recompute=recompute, frees=frees), micro_batch(seed)
        )
        assert torch.equal(loss, expected)
        assert not any((tape.embed, tape.blocks, tape.head, tape.held))
        assert len(routings) == len(expected_routings) > 0
        for one, other in zip(routings, expected_routings, strict=True):
            assert torch.equal(one.count_E, other.count_E)
            assert torch.equal(one.balance_loss, other.balance_loss)
    assert_same_bits(model, plain)


@pytest.mark.parametrize("recompute", [(), RECOMPUTABLE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_put_off_weight_gradients_have_the_same_bits(
    family: str, recompute: tuple[str, ...]
) -> None:
    plain, model, queue = model_of(family), model_of(family), WeightGradients()
    defer_weight_gradients(model, queue)
    segments = Segments(weight_gradients=queue, recompute=recompute, frees=Frees(poison=True))
    waiting = []
    for seed in (0, 1):
        plain_step(plain, micro_batch(seed))
        segments_step(model, segments, micro_batch(seed), defer=True)
        assert not queue.deferring
        waiting.append(queue.take())
    late = {id(entry.weight) for entry in waiting[0]}
    products = {name for name, p in model.named_parameters() if id(p) in late}
    assert {
        name
        for name in dict(model.named_parameters())
        if name.endswith(("_proj", "_proj.weight", "gate.weight"))
    } <= products
    assert not products & gradients(model).keys()
    for entries in waiting:
        WeightGradients.run(entries)
    assert_same_bits(model, plain)


def test_without_deferral_nothing_is_left_in_the_queue() -> None:
    plain, model, queue = model_of("deepseek_v2"), model_of("deepseek_v2"), WeightGradients()
    defer_weight_gradients(model, queue)
    plain_step(plain, micro_batch())
    segments_step(model, Segments(weight_gradients=queue), micro_batch())
    assert len(queue.entries) == 0
    assert_same_bits(model, plain)


def test_without_grad_mode_the_tape_stays_empty() -> None:
    model, batch = model_of("deepseek_v2"), micro_batch()
    (stage,) = whole_part(model).stages
    tape = ChunkTape(batch)
    with torch.no_grad():
        (loss,) = overlap.run(
            Segments(recompute=["attention"], frees=Frees(poison=True)).forward(
                stage, None, tape, []
            )
        )
    assert torch.equal(loss, plain_step(model, batch)[0])
    assert not tape.blocks
    for cut in (tape.embed, tape.head and tape.head[0]):
        assert not cut or not (cut._leaves or cut._edges or cut._again)


def test_an_unknown_segment_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"recompute has 'router': use some of 'attention', 'experts', 'shared_experts'",
    ):
        Segments(recompute=["attention", "router"])


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [(), RECOMPUTABLE], ids=["kept", "recomputed"])
def test_autocast_is_on_inside_segments_and_off_wherever_a_chunk_stops(
    recompute: tuple[str, ...],
) -> None:
    plain, model = model_of("deepseek_v2"), model_of("deepseek_v2")
    expected, _ = plain_step(plain, micro_batch(), torch.bfloat16)
    inside: list[bool] = []
    for module in model.modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(
                lambda *_: inside.append(torch.is_autocast_enabled("cpu"))
            )
    segments = Segments(autocast=torch.bfloat16, recompute=recompute)
    (stage,) = whole_part(model).stages
    tape = ChunkTape(micro_batch())
    stops = 0
    losses: Tensor | None = None
    for generator in (segments.forward(stage, None, tape, []), segments.backward(tape, None)):
        result, number = run_outside_autocast(generator)
        stops += number
        losses = result if losses is None else losses
    assert stops == 2 * 3 * len(model.routers())
    assert inside
    assert all(inside)
    assert losses is not None
    assert torch.equal(losses[0], expected)
    assert_same_bits(model, plain)


def run_outside_autocast(chunk: Generator[None, None, Any]) -> tuple[Any, int]:
    """Run a generator outside autocast; returns its result and how often it stopped."""
    stops = 0
    while True:
        try:
            next(chunk)
        except StopIteration as end:
            assert not torch.is_autocast_enabled("cpu")
            return end.value, stops
        stops += 1
        assert not torch.is_autocast_enabled("cpu")


# --- poison finds a wrong release -----------------------------------------------------------------


class CopyingExchange(Exchange):
    """One rank whose results are never its inputs' storages, as if they had traveled."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        return Dispatched(x_TD.clone(), routing.experts_TK.clone(), routing.weights_TK.clone())

    def start_combine(self, partial_RD: Tensor, handle: Any) -> Any:
        return super().start_combine(partial_RD.clone(), handle)

    def start_combine_backward(self, grad_TD: Tensor, handle: Any) -> Any:
        return super().start_combine_backward(grad_TD.clone(), handle)


class TooEarly(Segments):
    """Releases one tensor, named `what`, too early."""

    what = ""

    def _forward_block(
        self, block: Block, x_BSD: Tensor, tape: ChunkTape, routings: list[RoutingSummary]
    ) -> Steps[tuple[Tensor, BlockTape]]:
        out_BSD, kept = yield from super()._forward_block(block, x_BSD, tape, routings)
        if self.what == "block input":
            self.frees.release(x_BSD, out_BSD, held=[])
        elif self.what == "received rows":
            self._release_input(kept.experts, out_BSD)
        elif self.what == "router's weights":
            self.frees.release(kept.experts._leaves[-1], out_BSD, held=[])
        elif self.what == "block output":
            self.frees.release(out_BSD, held=[])
        return out_BSD, kept

    def _release_input(self, cut: Cut, out_BSD: Tensor) -> None:
        self.frees.release(cut._leaves[0], out_BSD, held=[])

    def _attend(self, block: Block, x_BSD: Tensor, tape: ChunkTape) -> Any:
        cut, attended = yield from super()._attend(block, x_BSD, tape)
        if self.what in ("residual", "normed rows"):
            self.frees.release(
                attended.residual_BSD if self.what == "residual" else attended.normed_TD, held=[]
            )
        return cut, attended

    def _was_read(self, attended: Attended, tape: ChunkTape, *cuts: Cut | None) -> None:
        super()._was_read(
            attended, tape, *(() if self.what == "input of what is run again" else cuts)
        )


class GateUpTooEarly(Segments):
    """Frees gate/up, which only the experts' graph holds."""

    def _forward_block(
        self, block: Block, x_BSD: Tensor, tape: ChunkTape, routings: list[RoutingSummary]
    ) -> Steps[tuple[Tensor, BlockTape]]:
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: (saved.append(x), x)[1], lambda x: x
        ):
            out_BSD, kept = yield from super()._forward_block(block, x_BSD, tape, routings)
        for x in saved:
            if (
                x.is_floating_point()
                and x.dim() == 2
                and x.shape[-1] == 22
                and not isinstance(x, nn.Parameter)
            ):
                self.frees.release(x, out_BSD, held=[])
        return out_BSD, kept


def is_found_out(segments: Segments) -> bool:
    """Whether the loss or a gradient of a step is not finite."""
    model = model_of("deepseek_v2")
    loss, _, _ = segments_step(model, segments, micro_batch())
    return not all(x.isfinite().all() for x in (loss, *gradients(model).values()))


def wrong(what: str) -> Segments:
    recompute = ("shared_experts",) if what == "input of what is run again" else ()
    segments = TooEarly(CopyingExchange(), frees=Frees(poison=True), recompute=recompute)
    segments.what = what
    return segments


WRONG = (
    "block input",
    "normed rows",
    "received rows",
    "router's weights",
    "block output",
    "residual",
    "input of what is run again",
)


@pytest.mark.parametrize("what", WRONG)
def test_poison_finds_a_tensor_that_was_released_too_early(what: str) -> None:
    assert is_found_out(wrong(what))


def test_poison_finds_gate_up_released_too_early() -> None:
    assert is_found_out(GateUpTooEarly(frees=Frees(poison=True)))


def test_poison_finds_a_combined_sum_released_before_it_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait_and_release(self: CopyingExchange, partial_RD: Tensor, handle: Any) -> Any:
        Frees(poison=True).release(partial_RD, held=[])
        return Exchange.start_combine(self, partial_RD, handle)

    monkeypatch.setattr(CopyingExchange, "start_combine", wait_and_release)
    assert is_found_out(Segments(CopyingExchange(), frees=Frees(poison=True)))


@pytest.mark.parametrize("exchange", [Exchange(), CopyingExchange()], ids=["aliases", "copies"])
def test_what_is_released_rightly_is_not_found_fault_with(exchange: Exchange) -> None:
    assert not is_found_out(Segments(exchange, frees=Frees(poison=True)))
    assert not is_found_out(Segments(exchange, frees=Frees(poison=True), recompute=RECOMPUTABLE))
    for name in RECOMPUTABLE:
        assert not is_found_out(Segments(exchange, frees=Frees(poison=True), recompute=[name]))
    assert not is_found_out(wrong("nothing"))


def test_sums_and_normed_rows_are_given_back_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages count: with an exchange that copies, an MoE block has two sums and the shared
    experts'; without copies two are one."""
    released: list[Tensor] = []
    original = Frees.release

    def release(self: Frees, x: Tensor, *still_read: Tensor, held: list[Tensor]) -> None:
        before = x.untyped_storage().nbytes()
        original(self, x, *still_read, held=held)
        if before and not x.untyped_storage().nbytes():
            released.append(x)

    monkeypatch.setattr(Frees, "release", release)
    model = model_of("deepseek_v2", first_k_dense_replace=0)
    (stage,) = whole_part(model).stages
    for exchange, per_block in ((CopyingExchange(), 1 + 3), (Exchange(), 1 + 2)):
        overlap.run(Segments(exchange).forward(stage, None, ChunkTape(micro_batch()), []))
        assert len(released) == per_block * len(model.layers)
        assert all(x.shape == (BATCH * LENGTH, 24) for x in released)
        released.clear()
