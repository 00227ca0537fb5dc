"""Cuts against plain autograd, bit for bit; the bytes that they keep; and frees, which may never
take a tensor that somebody else reads."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.live_bytes import PeakBytes
from lather.pipeline.tape import Cut, Frees, Outputs, poison_

SIZE = 63


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """A model of three segments with a residual, a second output of the first segment, and a
    parameter of the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Parameter(normal(SIZE, SIZE, seed=seed) / 8) for seed in range(3)
        )

    def first(self, x: Tensor) -> Outputs:
        y = (x @ self.a).tanh()
        return x + y, y.square().mean(), y.argmax(-1)

    def second(self, x: Tensor) -> Outputs:
        return ((x @ self.b).sigmoid(),)

    def third(self, x: Tensor, y: Tensor) -> Outputs:
        return ((x * y @ self.c @ self.b).logsumexp(-1).sum(),)

    def plain(self, x: Tensor) -> Tensor:
        residual, aux, _ = self.first(x)
        (y,) = self.second(residual)
        (loss,) = self.third(residual, y)
        return loss + 0.25 * aux


def gradients_of_plain(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model, x = Model(), x.clone().requires_grad_()
    loss = model.plain(x)
    loss.backward()
    return loss.detach(), [x.grad, model.a.grad, model.b.grad, model.c.grad]  # type: ignore[list-item]


def gradients_of_cuts(
    x: Tensor, recompute: Callable[[], contextlib.AbstractContextManager[None]] | None
) -> tuple[Tensor, list[Tensor]]:
    model = Model()
    first, (residual, aux, best) = Cut.run(model.first, [x], recompute=recompute)
    second, (y,) = Cut.run(model.second, [residual], recompute=recompute)
    third, (loss,) = Cut.run(model.third, [residual, y], recompute=recompute)
    assert not any(t.requires_grad for t in (residual, aux, best, y, loss))
    grad_residual, grad_y = third.backward([torch.ones(())])
    (grad_second,) = second.backward([grad_y])
    assert grad_residual is not None
    assert grad_second is not None
    (grad_x,) = first.backward([grad_residual + grad_second, torch.full((), 0.25), None])
    assert grad_x is not None
    return loss + 0.25 * aux, [grad_x, model.a.grad, model.b.grad, model.c.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("recompute", [None, contextlib.nullcontext], ids=["kept", "recomputed"])
@pytest.mark.parametrize("rows", [63, 1, 0])
def test_cuts_have_the_bits_of_plain_autograd(
    recompute: Callable[[], contextlib.AbstractContextManager[None]] | None, rows: int
) -> None:
    x = normal(rows, SIZE, seed=7)
    loss, grads = gradients_of_cuts(x, recompute)
    expected_loss, expected = gradients_of_plain(x)
    assert torch.equal(loss, expected_loss) or rows == 0
    for grad, plain in zip(grads, expected, strict=True):
        assert torch.equal(grad, plain)
    if rows:
        assert not torch.equal(grads[0] * 1.01, expected[0])


def activations(x: Tensor) -> Outputs:
    """A function whose graph keeps two tensors as big as x, besides x."""
    return (((x * x).exp() * x).sin(),)


@pytest.mark.parametrize(
    ("recompute", "tensors"), [(None, 3), (contextlib.nullcontext, 1)], ids=["kept", "recomputed"]
)
def test_between_forward_and_backward_there_is_the_graph_or_the_inputs(
    recompute: None, tensors: int
) -> None:
    with PeakBytes() as peak:
        x = torch.ones(SIZE, SIZE)
        cut, (y,) = Cut.run(activations, [x], recompute=recompute)
        storage_of_y = weakref.ref(y.untyped_storage())
        del x, y
        assert storage_of_y() is None
        assert peak.now == tensors * SIZE * SIZE * 4
        gradients = cut.backward([torch.ones(SIZE, SIZE)])
        assert peak.now == SIZE * SIZE * 4
        del gradients
        assert peak.now == 0


def test_the_function_is_let_go_of_after_its_last_run() -> None:
    for recompute, is_kept in ((None, False), (contextlib.nullcontext, True)):
        captured = torch.ones(3)
        alive = weakref.ref(captured)
        cut, _ = Cut.run(
            lambda x, kept=captured: (x + kept.sum(),), [torch.ones(2)], recompute=recompute
        )
        del captured
        assert (alive() is not None) == is_kept
        cut.backward([torch.ones(2)])
        assert alive() is None


@pytest.mark.parametrize("recompute", [None, contextlib.nullcontext], ids=["kept", "recomputed"])
def test_without_grad_mode_nothing_is_kept(recompute: None) -> None:
    with PeakBytes() as peak, torch.no_grad():
        x = torch.ones(SIZE, SIZE)
        cut, outputs = Cut.run(activations, [x], recompute=recompute)
        assert torch.equal(outputs[0], activations(x)[0])
        del x, outputs
        assert peak.now == 0
    with pytest.raises(ValueError, match=r"shorter|longer"):
        cut.backward([torch.ones(SIZE, SIZE)])


def test_gradients_that_are_none_or_for_nothing() -> None:
    weight = nn.Parameter(torch.ones(2))

    def function(x: Tensor, y: Tensor, unused: Tensor) -> Outputs:
        return x * 2, y * weight, x.detach() * 3, x

    def run(gradients: list[Tensor | None]) -> list[Tensor | None]:
        weight.grad = None
        cut, outputs = Cut.run(function, [torch.ones(2), torch.full((2,), 5.0), torch.ones(2)])
        assert len(outputs) == 4
        return cut.backward(gradients)

    one = torch.ones(2)
    grad_x, grad_y, grad_unused = run([one, None, one, None])
    assert grad_x is not None
    assert torch.equal(grad_x, one * 2)
    assert grad_y is None
    assert grad_unused is None
    assert weight.grad is None
    grad_x, grad_y, _ = run([None, one, one, one])
    assert torch.equal(torch.stack([grad_x, grad_y, weight.grad]), torch.stack([one, one, one * 5]))  # type: ignore[list-item]
    assert run([None, None, None, None]) == [None, None, None]
    assert torch.equal(one, torch.ones(2))


def test_the_context_is_entered_for_the_second_run_alone() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    def function(x: Tensor) -> Outputs:
        entered.append("run" if torch.is_grad_enabled() else "run without grad")
        return (x * x,)

    cut, (y,) = Cut.run(function, [torch.ones(3)], recompute=context)
    assert entered == ["run without grad"]
    with torch.no_grad():
        cut.backward([torch.ones_like(y)])
    assert entered == ["run without grad", "in", "run", "out"]


# --- frees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (1,), ()])
def test_own_storage_is_given_back_whoever_has_a_reference(
    shape: tuple[int, ...], device: str
) -> None:
    x, other = torch.ones(shape, device=device), torch.ones(shape, device=device)
    view = x.view(-1)
    Frees().release(x, other, held=[])
    assert view.untyped_storage().nbytes() == 0
    assert other.untyped_storage().nbytes() == other.numel() * 4
    Frees().release(x, other, held=[])
    Frees(poison=True).release(x, other, held=[])


@pytest.mark.parametrize("frees", [Frees(), Frees(poison=True)], ids=["free", "poison"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1)])
def test_what_somebody_lives_in_is_left_alone(frees: Frees, shape: tuple[int, ...]) -> None:
    x, other = torch.ones(shape), torch.zeros(shape)
    for reader in (x, x.detach(), x.flatten(), x[:1], x.T, x[..., -1:].squeeze()):
        frees.release(x, other, reader, held=[])
        assert torch.equal(x, torch.ones(shape))
    assert torch.equal(other, torch.zeros(shape))


def test_poison_is_all_of_the_storage_and_keeps_it() -> None:
    base = torch.ones(4, 6)
    Frees(poison=True).release(base[1:2, ::2], torch.ones(1), held=[])
    assert base.isnan().all()
    for dtype in (torch.bfloat16, torch.float64):
        x = torch.ones(3, dtype=dtype)[1:]
        x.requires_grad_()
        poison_(x)
        assert x.isnan().all()


@pytest.mark.parametrize(
    ("dtype", "floating"), [(torch.int32, torch.float32), (torch.int64, torch.float64)]
)
def test_poison_of_integers_is_out_of_range_and_a_nan_where_they_are_bits(
    dtype: torch.dtype, floating: torch.dtype
) -> None:
    x = torch.arange(6, dtype=dtype)
    Frees(poison=True).free_buffer(x[1:3])
    assert (x > 2**30).all()
    assert x.view(floating).isnan().all()
    with pytest.raises(IndexError):
        torch.ones(100)[x]


@pytest.mark.parametrize(
    ("recompute", "number"), [(None, 0), (contextlib.nullcontext, 1)], ids=["kept", "recomputed"]
)
def test_only_a_second_run_reads_the_inputs_themselves(recompute: None, number: int) -> None:
    x = torch.ones(3)
    cut, (y,) = Cut.run(activations, [x], recompute=recompute)
    assert [kept.untyped_storage() is x.untyped_storage() for kept in cut.kept_inputs] == [
        True
    ] * number
    cut.backward([y])
    assert cut.kept_inputs == []


def test_without_early_frees_the_chunk_holds_what_would_be_given_back() -> None:
    held: list[Tensor] = []
    x = torch.ones(3)
    Frees(enabled=False, poison=True).release(x, x, held=held)
    assert held[0] is x
    assert torch.equal(x, torch.ones(3))
