"""Routed experts in every memory mode against the plain formula; the tensors that they keep for
backward; padding, poison, frozen weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lather.kernels.swiglu import CLAMPED_SWIGLU, SWIGLU, Gate
from lather.models import experts as experts_module
from lather.models.experts import Experts
from lather.models.gated_mlp import GatedMLP
from lather.models.layers import RMSNorm
from lather.models.routing import Router
from models.tiny import error, largest_error, random_normal

LEAN = ["saved", "recompute"]
E = 5
ROUTINGS = {
    "uneven": [[0, 2], [2, 4], [0, 2], [4, 2], [2, 0], [1, 2], [2, 1]],
    "all to one, none to the rest": [[3]] * 6,
    "some elsewhere": [[0, -1], [-1, -1], [2, 0], [-1, 4], [-1, 1]],
    "K = 1": [[4], [0], [0], [2]],
    "all experts": [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]],
    "no token": torch.zeros(0, 2, dtype=torch.int64).tolist(),
}
"""The experts of each token."""
WIDTHS = {"odd": (9, 7), "grouped_mm": (16, 8)}


class Case:
    def __init__(
        self,
        routing: str,
        widths: str = "odd",
        *,
        gate: Gate = SWIGLU,
        bias: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        d, f = WIDTHS[widths]
        self.module = Experts(E, d, f, gate=gate, bias=bias).to(dtype)
        generator = torch.Generator().manual_seed(0)
        for p in self.module.parameters():
            nn.init.normal_(p, std=0.7, generator=generator)
        self.experts_TK = torch.tensor(ROUTINGS[routing], dtype=torch.int64).view(
            -1, 2 if routing == "no token" else len(ROUTINGS[routing][0])
        )
        t, k = self.experts_TK.shape
        self.x_TD = random_normal(t, d, seed=1).to(dtype).requires_grad_()
        self.weights_TK = random_normal(t, k, seed=2).to(dtype).requires_grad_()
        self.cotangent = random_normal(t, d, seed=3).to(dtype)

    def results(self, memory: str) -> dict[str, Tensor]:
        self.module.memory = memory
        y_TD = self.module(self.x_TD, self.experts_TK, self.weights_TK)
        inputs = {
            "x": self.x_TD,
            "weights": self.weights_TK,
            **dict(self.module.named_parameters()),
        }
        grads = torch.autograd.grad(
            (y_TD * self.cotangent).sum(), list(inputs.values()), materialize_grads=True
        )
        return {"y": y_TD.detach(), **dict(zip(inputs, grads, strict=True))}


@pytest.mark.parametrize("memory", LEAN)
@pytest.mark.parametrize(
    ("gate", "bias"),
    [(SWIGLU, False), (SWIGLU, True), (CLAMPED_SWIGLU, True), (Gate(1.5, 0.5, 0.8, True), False)],
    ids=str,
)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_output_and_every_gradient_are_those_of_plain_autograd(
    routing: str, gate: Gate, bias: bool, memory: str
) -> None:
    case = Case(routing, gate=gate, bias=bias)
    assert largest_error(case.results(memory), case.results("reference")) < (1e-13, "")


@pytest.mark.parametrize("memory", LEAN)
@pytest.mark.parametrize("routing", ["uneven", "some elsewhere", "no token"])
def test_the_same_through_grouped_mm(routing: str, memory: str) -> None:
    case = Case(routing, "grouped_mm", dtype=torch.float32)
    assert largest_error(case.results(memory), case.results("reference")) < (3e-6, "")


@pytest.mark.parametrize("routing", ["uneven", "some elsewhere", "K = 1"])
def test_gradients_are_those_of_finite_differences(routing: str) -> None:
    case = Case(routing, gate=CLAMPED_SWIGLU, bias=True)
    names, parameters = zip(*case.module.named_parameters(), strict=True)

    def run(x: Tensor, weights: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(
            case.module, dict(zip(names, values, strict=True)), (x, case.experts_TK, weights)
        )

    assert torch.autograd.gradcheck(run, (case.x_TD, case.weights_TK, *parameters), fast_mode=True)


def test_tolerance_rejects_one_percent_in_any_weight() -> None:
    case = Case("uneven", gate=CLAMPED_SWIGLU, bias=True)
    expected = case.results("reference")
    for p in case.module.parameters():
        before = p.data.clone()
        p.data[2] *= 1.01
        assert largest_error(case.results("saved"), expected)[0] > 1e-4
        p.data.copy_(before)


@pytest.fixture
def _aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "run_alignment", lambda device, dtype: 8)


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill fresh memory with NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_poisoned", "_aligned")
@pytest.mark.parametrize("memory", LEAN)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_runs_padded_as_on_cuda_change_nothing_and_fresh_memory_is_written_before_it_is_read(
    routing: str, memory: str
) -> None:
    assert torch.empty(3).isnan().all()
    case = Case(routing, gate=CLAMPED_SWIGLU, bias=True)
    assert largest_error(case.results(memory), case.results("reference")) < (1e-13, "")


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "gate_up_bias", "down_bias"])
def test_a_frozen_parameter_gets_no_gradient_and_the_others_theirs(frozen: str) -> None:
    case = Case("uneven", bias=True)
    expected = case.results("reference")
    case.module.get_parameter(frozen).requires_grad_(False)
    case.module.memory = "saved"
    (case.module(case.x_TD, case.experts_TK, case.weights_TK) * case.cotangent).sum().backward()
    assert case.module.get_parameter(frozen).grad is None
    actual = {name: p.grad for name, p in case.module.named_parameters() if name != frozen}
    assert largest_error(
        {"x": case.x_TD.grad, **actual}, {name: expected[name] for name in ("x", *actual)}
    ) < (1e-13, "")


# --- what is kept ---------------------------------------------------------------------------------


def saved_elements(module: nn.Module, *arguments: Tensor) -> int:
    """Count the floating-point elements that backward keeps, each storage once, without parameters
    and inputs."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *arguments)}
    elements: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in known:
            elements[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        y = module(*arguments)
    # hooks do not see what a Function keeps beside save_for_backward
    for value in attributes_of_the_graph(y):
        save(value)
    return sum(elements.values())


def attributes_of_the_graph(y: Tensor) -> Iterator[Tensor]:
    nodes = [y.grad_fn]
    assert nodes[0] is not None
    while nodes:
        node = nodes.pop()
        if node is not None:
            yield from (
                value
                for value in getattr(node, "__dict__", {}).values()
                if isinstance(value, Tensor)
            )
            nodes.extend(parent for parent, _ in node.next_functions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("memory", "per_row"), [("saved", 2), ("recompute", 0)])
def test_experts_keep_gate_up_and_nothing_else(
    memory: str, per_row: int, dtype: torch.dtype
) -> None:
    case = Case("uneven", dtype=dtype)
    case.module.memory = memory
    saved = saved_elements(case.module, case.x_TD, case.experts_TK, case.weights_TK)
    assert saved == per_row * case.experts_TK.numel() * 7


@pytest.mark.parametrize(("memory", "per_row"), [("saved", 2), ("recompute", 0), ("reference", 4)])
def test_gated_mlp_keeps_gate_up_and_nothing_else(memory: str, per_row: int) -> None:
    module = GatedMLP(9, 7)
    module.memory = memory
    assert saved_elements(module, torch.randn(6, 9).requires_grad_()) == per_row * 6 * 7


def test_rms_norm_keeps_one_number_per_row() -> None:
    assert saved_elements(RMSNorm(9, 1e-6), torch.randn(2, 3, 9).requires_grad_()) == 6


# --- the other lean layers ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["experts", "mlp", "router"])
def test_backward_inside_autocast_is_that_outside(kind: str) -> None:
    case = Case("uneven", dtype=torch.float32)
    mlp, router = GatedMLP(9, 7), Router(9, E, 2)
    grads = []
    for inside in (False, True):
        x = case.x_TD.detach().requires_grad_()
        outputs = {
            "experts": lambda x: case.module(x, case.experts_TK, case.weights_TK),
            "mlp": mlp,
            "router": lambda x: router(x).weights_TK,
        }
        y = outputs[kind](x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            y.square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("memory", LEAN)
@pytest.mark.parametrize("shape", [(6, 9), (2, 3, 9), (0, 9), (1, 0, 9)], ids=str)
def test_gated_mlp_is_its_plain_formula(shape: tuple[int, ...], memory: str) -> None:
    module = GatedMLP(9, 7).double()
    x, results = random_normal(*shape).requires_grad_(), []
    for mode in (memory, "reference"):
        module.memory = mode
        y = module(x)
        grads = torch.autograd.grad(
            (y * random_normal(*shape, seed=1)).sum(), (x, *module.parameters())
        )
        results.append(dict(zip("yxgud", (y.detach(), *grads), strict=True)))
    assert largest_error(*results) < (1e-13, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_mlp_under_autocast_is_its_plain_formula_within_rounding(dtype: torch.dtype) -> None:
    module, x, results = GatedMLP(64, 48), random_normal(20, 64).to(dtype).requires_grad_(), []
    for mode in ("saved", "reference"):
        module.memory = mode
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x)
        assert y.dtype == torch.bfloat16
        grads = torch.autograd.grad(
            (y * random_normal(20, 64, seed=1)).sum(), (x, *module.parameters())
        )
        assert [grad.dtype for grad in grads] == [dtype, *[torch.float32] * 3]
        results.append([tensor.float() for tensor in (y, *grads)])
    assert all(
        (mine - plain).norm() < 2**-6 * plain.norm() for mine, plain in zip(*results, strict=True)
    )


def test_rms_norm_has_right_gradients() -> None:
    norm = RMSNorm(5, eps=0.3).double()
    nn.init.uniform_(norm.weight, -2, 2, generator=torch.Generator().manual_seed(0))

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(run, (random_normal(2, 3, 5).requires_grad_(), norm.weight))


def test_rms_norm_in_bf16_rounds_once_forward_and_backward() -> None:
    norm, x = RMSNorm(64, eps=1e-6).bfloat16(), random_normal(20, 64).bfloat16().requires_grad_()
    wide_norm, wide = RMSNorm(64, eps=1e-6), x.detach().float().requires_grad_()
    cotangent = random_normal(20, 64, seed=1).bfloat16()
    y, wide_y = norm(x), wide_norm(wide)
    (y * cotangent).sum().backward()
    (wide_y * cotangent.float()).sum().backward()
    assert y.dtype == x.grad.dtype == norm.weight.grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert error(y.float(), wide_y) < 2**-7
    assert error(x.grad.float(), wide.grad) < 2**-7  # type: ignore[union-attr]
    assert error(norm.weight.grad.float(), wide_norm.weight.grad) < 2**-7  # type: ignore[union-attr]


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", LEAN)
@pytest.mark.parametrize("widths", WIDTHS)
def test_under_autocast_products_are_in_bf16_and_gradients_in_the_parameters_dtype(
    widths: str, memory: str
) -> None:
    case = Case("uneven", widths, gate=CLAMPED_SWIGLU, bias=True, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = case.results(memory)
    wide = case.results("reference")
    assert {name: tensor.dtype for name, tensor in narrow.items()} == dict.fromkeys(
        wide, torch.float32
    )
    for name, expected in wide.items():
        assert 0 < (narrow[name] - expected).norm() < 0.03 * expected.norm(), name
