"""Attention by torch's fused kernels (`F.scaled_dot_product_attention`), and the form in which they
get queries, keys and values on a GPU.

Kernels differ in what they take. cuDNN's takes values that are narrower than the queries, as those
of latent attention are, but may find out only in a call that it has no plan for these sizes. It
then raises an error, for which torch does not choose another kernel. FlashAttention needs equal
widths, up to 256. The memory-efficient kernel takes different widths, but no groups. All others
have (S, T) elements. `candidates` has the order.

On a CPU the fused kernel needs equal widths, so narrower tensors are padded with zeros.

Letters: B sequences, S queries, T keys, H heads, G key-value heads, N width of a query and key, U
of a value.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend

from lather.device import STANDINS, is_gpu
from lather.torch_private import fused_sdp_choice

Operands = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""
Register = Callable[[Operands, Callable[[Tensor], Tensor]], None]
TRIAL_LENGTH = 128
"""Number of queries and keys of a trial without gradients: at most this. Lengths vary in evaluation
and generation, and without a backward pass it does not matter how long a sequence is."""


@dataclass(frozen=True)
class Form:
    """The form in which a kernel gets queries, keys and values."""

    padded: bool = True
    """Narrower tensors are padded with zeros to equal widths."""
    repeated: bool = False
    """Each query head has a key and a value head, which are views or copies of its group's."""
    cudnn: bool = True
    """torch may choose cuDNN's kernel."""

    def prepare(self, x_BGTU: Tensor, heads: int, width: int) -> Tensor:
        """Return queries, keys or values in this form, with at most `heads` heads and `width`
        elements."""
        if self.padded and x_BGTU.shape[-1] < width:
            x_BGTU = F.pad(x_BGTU, (0, width - x_BGTU.shape[-1]))
        if self.repeated and x_BGTU.shape[1] < heads:
            times = heads // x_BGTU.shape[1]
            x_BGTU = x_BGTU.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)
        return x_BGTU

    def allowed(self) -> AbstractContextManager[None]:
        """Inside this context torch chooses among the kernels for this form."""
        return nullcontext() if self.cudnn else _without_cudnn()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Inside the block torch does not choose cuDNN's kernel. (Unlike `sdpa_kernel`, it leaves the
    caller's choice among the other kernels as it is.)"""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@dataclass(frozen=True)
class Case:
    """Everything on which the choice of a kernel depends."""

    device: torch.device
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    """(Heads, length, width) of queries, keys and values."""
    strides: tuple[tuple[int, ...], ...]
    """Strides of the same dims."""
    masked: bool
    """With a mask; else causal."""
    gradients: bool
    deterministic: bool

    @classmethod
    def of(cls, operands: Operands, mask: Tensor | None) -> Case:
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
        shapes = tuple(
            (heads, length if gradients else min(length, TRIAL_LENGTH), width)
            for _, heads, length, width in (x.shape for x in operands)
        )
        return cls(
            operands[0].device,
            operands[0].dtype,
            shapes,
            tuple(x.stride()[1:] for x in operands),
            mask is not None,
            gradients,
            torch.are_deterministic_algorithms_enabled(),
        )

    def chosen(self, form: Form) -> SDPBackend:
        """Ask torch which kernel it would call for this form."""
        heads, width = self.shapes[0][0], max(shape[-1] for shape in self.shapes)
        q, k, v = (
            torch.empty(
                (1, heads if form.repeated else h, t, width if form.padded else u),
                dtype=self.dtype,
                device=self.device,
                requires_grad=self.gradients,
            )
            for h, t, u in self.shapes
        )
        gqa = q.shape[1] != k.shape[1]
        with form.allowed():
            number = fused_sdp_choice(
                q, k, v, self._mask(), 0.0, not self.masked, scale=None, enable_gqa=gqa
            )
        return SDPBackend(number)

    def _mask(self) -> Tensor | None:
        sizes = (1, 1, self.shapes[0][1], self.shapes[1][1])
        return torch.ones(sizes, dtype=torch.bool, device=self.device) if self.masked else None

    def runs(self, form: Form) -> bool:
        """Try a form. Return whether that passes; see `passes`."""
        return self.passes(lambda operands: attend_in(form, operands, self._mask(), 1.0, None))

    def passes(self, attend: Callable[[Operands], Tensor]) -> bool:
        """Attend once with a row of zeros, forward and, with gradients, backward. Return whether
        that passes; if it does not, warn. A lack of memory is raised instead."""
        operands = []
        for shape, strides in zip(self.shapes, self.strides, strict=True):
            row = max(size * stride for size, stride in zip(shape, strides, strict=True))
            x = torch.empty_strided(
                (1, *shape), (row, *strides), dtype=self.dtype, device=self.device
            )
            operands.append(x.zero_().requires_grad_(self.gradients))
        q, k, v = operands
        try:
            with saved_tensors_hooks(lambda x: x, lambda x: x):  # so that a trial is not profiled
                y = attend((q, k, v))
                if self.gradients:
                    torch.autograd.grad(y, operands, torch.zeros_like(y))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            sizes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
            warnings.warn(
                f"a kernel for attention of {sizes} in {str(self.dtype)[6:]} failed in a "
                f"trial, so another one is used: {str(error).strip()[:300]}",
                stacklevel=2,
            )
            return False
        return True


def candidates(case: Case) -> Iterator[tuple[SDPBackend, Form]]:
    """Yield kernels and the form that each would get, the fastest first.

    cuDNN makes a plan for every number of keys, so it is left out with a mask: there are masks with
    a cache, which grows with every token."""
    (heads, _, width), (kv_heads, _, _), (_, _, value_width) = case.shapes
    padding = (True,) if width == value_width else (False, True)
    if not case.masked:
        for padded in padding:
            yield SDPBackend.CUDNN_ATTENTION, Form(padded)
    yield SDPBackend.FLASH_ATTENTION, Form(cudnn=False)
    for padded in padding:
        yield SDPBackend.EFFICIENT_ATTENTION, Form(padded, heads != kv_heads, cudnn=False)


@functools.cache
def form_of(case: Case) -> Form:
    """Return the first candidate's form for which torch chooses that kernel and a trial passes, or
    else the padded form without cuDNN, for whichever kernel takes it. Only CUDA's kernels are
    tried."""
    for kernel, form in candidates(case):
        if case.chosen(form) == kernel and (case.device.type in STANDINS or case.runs(form)):
            return form
    return Form(cudnn=False)


def fused_attention(
    q_BHSN: Tensor,
    k_BGTN: Tensor,
    v_BGTU: Tensor,
    mask: Tensor | None,
    scale: float,
    register: Register | None = None,
) -> Tensor:
    """Attend with torch's fused kernels; causal if there is no mask, (B or 1, 1, S, T). Return (B,
    H, S, U). `register` gets the tensors that the kernel saves for backward, and the function that
    brings queries, keys or values into the same form."""
    operands = (q_BHSN, k_BGTN, v_BGTU)
    form = form_of(Case.of(operands, mask)) if is_gpu(q_BHSN) else Form()
    return attend_in(form, operands, mask, scale, register)


def attend_in(
    form: Form, operands: Operands, mask: Tensor | None, scale: float, register: Register | None
) -> Tensor:
    """Bring queries, keys and values into a form, and attend; see `fused_attention`."""
    heads, width = operands[0].shape[1], max(x.shape[-1] for x in operands)
    prepare = partial(form.prepare, heads=heads, width=width)
    q, k, v = map(prepare, operands)
    if register is not None:
        register((q, k, v), prepare)
    with form.allowed():
        y: Tensor = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return y[..., : operands[2].shape[-1]]
