"""Forms of queries, keys and values for torch's fused kernels: which is chosen, here from made-up
answers, and on the stand-in from its own; that all give the same attention; what is saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.live_bytes import PeakBytes
from lather.models import fused_attention
from lather.models.block import Block
from lather.models.fused_attention import Case, Form, attend_in, form_of
from lather.models.saving.recomputed import Recomputation
from models.tiny import error, layout_of, random_normal, tiny_family_model
from scripts import printed_by

CUDNN, FLASH, EFFICIENT, MATH = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
CPU = torch.device("cpu")
LATENT = ((16, 4096, 192), (16, 4096, 192), (16, 4096, 128))
GROUPED = ((32, 4096, 128), (4, 4096, 128), (4, 4096, 128))
CACHED = ((16, 1, 576), (1, 99, 576), (1, 99, 512))
UNPADDED, PADDED, NO_CUDNN = Form(padded=False), Form(), Form(cudnn=False)


def case_of(shapes: Any, *, masked: bool = False, gradients: bool = True) -> Case:
    strides = tuple((width, heads * width, 1) for heads, _, width in shapes)
    return Case(CPU, torch.bfloat16, shapes, strides, masked, gradients, False)


def hopper(case: Case, form: Form, newest: bool = False) -> SDPBackend:
    """Return the kernel that torch 2.11 with cuDNN 9.19 chooses; with `newest` that of versions
    whose cuDNN refuses (192, 192)."""
    (h, _, n), (g, _, _), (_, _, u) = case.shapes
    widths = (max(n, u),) * 2 if form.padded else (n, u)
    if form.cudnn and max(widths) <= 256 and not (newest and widths == (192, 192)):
        return CUDNN
    if widths[0] == widths[1] <= 256:
        return FLASH
    return EFFICIENT if h == g or form.repeated else MATH


def newest_hopper(case: Case, form: Form) -> SDPBackend:
    return hopper(case, form, newest=True)


def ampere(case: Case, form: Form) -> SDPBackend:
    """Return the kernel where cuDNN is not preferred, or is switched off."""
    return FLASH if form.padded else EFFICIENT


def no_kernel(case: Case, form: Form) -> SDPBackend:
    return MATH


CACHE_FORM = Form(padded=False, repeated=True, cudnn=False)


@pytest.mark.parametrize(
    ("case", "chosen", "failing", "expected"),
    [
        (case_of(LATENT), hopper, [], UNPADDED),
        (case_of(LATENT), newest_hopper, [], UNPADDED),
        (case_of(LATENT), hopper, [UNPADDED], PADDED),
        (case_of(LATENT), newest_hopper, [UNPADDED], NO_CUDNN),
        (case_of(LATENT), hopper, [UNPADDED, PADDED], NO_CUDNN),
        (case_of(LATENT), hopper, [UNPADDED, PADDED, NO_CUDNN], Form(padded=False, cudnn=False)),
        (case_of(LATENT), ampere, [], NO_CUDNN),
        (case_of(LATENT), no_kernel, [], NO_CUDNN),
        (case_of(GROUPED), hopper, [], PADDED),
        (case_of(GROUPED), hopper, [PADDED], NO_CUDNN),
        # cuDNN would make a plan for every length
        (case_of(CACHED, masked=True), hopper, [], CACHE_FORM),
    ],
)
def test_a_form_is_chosen_by_asking_and_by_a_trial(
    case: Case,
    chosen: Callable[..., SDPBackend],
    failing: list[Form],
    expected: Form,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trials before the chosen one are those that failed, in order; no form is tried for which
    torch would choose another kernel."""
    tried: list[Form] = []
    monkeypatch.setattr(Case, "chosen", chosen)
    monkeypatch.setattr(Case, "runs", lambda _, form: tried.append(form) or form not in failing)
    assert form_of.__wrapped__(case) == expected
    assert chosen is no_kernel or tried == [*failing, expected]


def test_all_heads_read_the_one_key_of_a_cached_token_through_a_view() -> None:
    key = torch.zeros(2, 1, 99, 576)
    assert CACHE_FORM.prepare(key, 16, 576).untyped_storage().data_ptr() == key.data_ptr()


def test_lengths_do_not_matter_without_gradients() -> None:
    """Batches of all lengths are few cases; in training each length is a case of its own."""

    lengths = (100, 1000, 2000, 3000)
    for gradients, num_cases in ((True, 4), (False, 2)):
        shapes = [(2, length, 3, 8) for length in lengths]
        tensors = [torch.zeros(shape, requires_grad=gradients).transpose(1, 2) for shape in shapes]
        assert len({Case.of((x, x, x), None) for x in tensors}) == num_cases


# --- Trials ---------------------------------------------------------------------------------------


class NoPlan(torch.autograd.Function):
    """Attention whose backward pass has no plan."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, v: Tensor) -> Tensor:
        return q[..., : v.shape[-1]] + 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("cuDNN Frontend error: No valid execution plans")


def without_plan_backward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return NoPlan.apply(q, v)  # type: ignore[no-untyped-call, no-any-return]


def without_plan(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    raise RuntimeError("cuDNN Frontend error: No valid execution plans")


def out_of_memory(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


SMALL = ((4, 6, 24), (2, 6, 24), (2, 6, 16))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("form", [UNPADDED, PADDED, Form(repeated=True, cudnn=False)], ids=str)
def test_a_trial_passes(masked: bool, gradients: bool, form: Form) -> None:
    case = case_of(SMALL, masked=masked, gradients=gradients)
    with warnings.catch_warnings(), torch.set_grad_enabled(gradients):
        warnings.simplefilter("error")
        assert case.runs(form)


@pytest.mark.parametrize(
    ("attention", "gradients"), [(without_plan, False), (without_plan_backward, True)]
)
def test_a_trial_without_a_plan_fails_and_says_so(
    attention: Callable[..., Tensor], gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with pytest.warns(UserWarning, match="2x6x16 in bfloat16 failed.*No valid execution"):
        assert not case_of(SMALL, gradients=gradients).runs(UNPADDED)


def test_a_lack_of_memory_is_no_failed_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        case_of(SMALL).runs(UNPADDED)


# --- Forms ----------------------------------------------------------------------------------------

FORMS = [Form(*flags) for flags in product((False, True), repeat=3)]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_forms_give_the_same(form: Form, num_kv_heads: int) -> None:
    q, k, v = (
        random_normal(2, heads, 5, width, seed=seed).requires_grad_()
        for seed, (heads, width) in enumerate([(4, 6), (num_kv_heads, 6), (num_kv_heads, 3)])
    )
    results = []
    for each in (form, Form()):
        y = attend_in(each, (q, k, v), None, 0.3, None)
        gradients = torch.autograd.grad(y, (q, k, v), random_normal(*y.shape, seed=9))
        results.append((y, *gradients))
    for actual, expected in zip(*results, strict=True):
        assert actual.shape == expected.shape
        assert error(actual, expected) < 1e-12
    assert torch.backends.cuda.cudnn_sdp_enabled()


class Kernel(torch.autograd.Function):
    """Attention that saves its inputs and its output, as fused kernels do, whatever the widths.
    (torch's own for the CPU takes equal widths alone.)"""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        y = Kernel.plain(q, k, v, scale)
        ctx.save_for_backward(q, k, v, y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            y = Kernel.plain(*leaves, ctx.scale)
        return *torch.autograd.grad(y, leaves, grad), None

    @staticmethod
    def plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return (scale * q @ k.mT).softmax(-1) @ v


def kernel(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, attn_mask: None, **options: bool
) -> Tensor:
    return Kernel.apply(q, k, v, scale)  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe"])
def test_in_every_form_what_the_kernel_saves_is_recomputed(
    family: str, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients have the bits of saved tensors. Neither keys nor values of latent attention are
    saved, and neither queries nor keys of grouped queries, as their widths are in the form."""
    monkeypatch.setattr(fused_attention, "is_gpu", lambda x: True)
    monkeypatch.setattr(fused_attention, "form_of", lambda case: form)
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    block = tiny_family_model(family).double().layers[0]
    assert isinstance(block, Block)
    x_BSD = random_normal(2, 7, 24).requires_grad_()
    results, saved = [], []
    for enabled in (False, True):
        recomputation = Recomputation(enabled=enabled)
        with PeakBytes() as alive:
            with recomputation.watch():
                y_BSD = block.self_attn(x_BSD, layout_of(x_BSD), recomputation)
            saved.append(alive.now)
        block.zero_grad()
        x_BSD.grad = None
        (y_BSD * random_normal(2, 7, 24, seed=3)).sum().backward()
        results.append(
            [y_BSD.detach(), x_BSD.grad, *(p.grad for p in block.self_attn.parameters())]
        )
        del y_BSD
    for kept, again in zip(*results, strict=True):
        assert again.equal(kept)
    if family == "deepseek_v2":
        not_saved = 3 * 16 + 3 * (16 if form.padded else 7)
    else:
        not_saved = (6 + (6 if form.repeated else 2)) * 10
    assert saved[0] - saved[1] >= 2 * 7 * 8 * not_saved


# --- The stand-in ---------------------------------------------------------------------------------

ON_THE_STANDIN = """
import torch
from lather.device import deterministic
from lather.models.fused_attention import Case, form_of, fused_attention
from lather.standin.mode import StandInMode

class Counted(StandInMode):
    ran_here = ()
    def ran(self, operation):
        name = operation.name
        if "attention" in name or "pad" in name or name == "clone":
            self.ran_here += (name.replace("_scaled_dot_product_", ""),)

def show(what, q, k, v, masked=False):
    mask = q.new_ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool) if masked else None
    form = form_of(Case.of((q, k, v), mask))
    mode.ran_here = ()
    y = fused_attention(q, k, v, mask, 0.1)
    if y.requires_grad:
        y.sum().backward()
    ran = " ".join(mode.ran_here)
    print(f"{what}: {form.padded:d}{form.repeated:d}{form.cudnn:d} {ran}")

def of(dtype, *shapes, gradients=True):
    return [torch.empty(2, length, heads, width, dtype=dtype, device=mode.device).transpose(1, 2)
            .requires_grad_(gradients) for heads, length, width in shapes]

LATENT = ((16, 512, 192), (16, 512, 192), (16, 512, 128))
GROUPED = ((32, 512, 128), (4, 512, 128), (4, 512, 128))
CACHED = ((16, 1, 576), (1, 300, 576), (1, 300, 512))
with Counted() as mode:
    show("latent", *of(torch.bfloat16, *LATENT))
    show("latent fp32", *of(torch.float32, *LATENT))
    show("grouped", *of(torch.bfloat16, *GROUPED))
    show("grouped fp32", *of(torch.float32, *GROUPED))
    show("cached", *of(torch.bfloat16, *CACHED, gradients=False), masked=True)
    with deterministic():
        show("deterministic", *of(torch.bfloat16, *LATENT))
"""
EXPECTED = """
latent: 001 cudnn_attention cudnn_attention_backward
latent fp32: 000 efficient_attention efficient_attention_backward
grouped: 101 flash_attention flash_attention_backward
grouped fp32: 110 clone clone efficient_attention efficient_attention_backward
cached: 010 efficient_attention
deterministic: 100 constant_pad_nd flash_attention flash_attention_backward constant_pad_nd
"""


def test_the_stand_in_answers_as_hopper_with_torch_2_11() -> None:
    """Latent attention is passed as it is; FlashAttention stands for cuDNN where widths are
    equal."""
    assert printed_by(ON_THE_STANDIN).strip() == EXPECTED.strip()
