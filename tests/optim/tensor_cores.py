"""Products of bf16 matrices with results in fp32 on the CPU, as the tensor cores of a GPU compute
them: exact products, and sums in fp32. With `truncated` each 16 products are added to the sum at
once, which is rounded towards zero; at n = 1,024 the error of a split product is then 4.6e-6, as
measured on an H200."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

AT_ONCE = 16
aten = torch.ops.aten


class TensorCores(TorchDispatchMode):
    """Computes batched products that have an `out_dtype`, inside the block, and counts them."""

    def __init__(self, truncated: bool = False) -> None:
        super().__init__()
        self.truncated, self.num_products = truncated, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.bmm.dtype:
            return self.product(*args)
        if func is aten.bmm.dtype_out:
            return kwargs["out"].copy_(self.product(*args))
        if func is aten.baddbmm.dtype_out:
            total, a, b, dtype = args
            assert kwargs["out"] is total
            return total.add_(self.product(a, b, dtype), alpha=kwargs.get("alpha", 1))
        return func(*args, **kwargs)

    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        assert dtype == torch.float32
        self.num_products += 1
        if not self.truncated:
            return a.float() @ b.float()
        total = torch.zeros(*a.shape[:2], b.shape[2])
        for start in range(0, a.shape[2], AT_ONCE):
            k = slice(start, start + AT_ONCE)
            total = _towards_zero(total.double() + a[:, :, k].double() @ b[:, k].double())
        return total


def _towards_zero(x: Tensor) -> Tensor:
    rounded = x.float()
    too_large = rounded.abs().double() > x.abs()
    return torch.where(too_large, torch.nextafter(rounded, torch.zeros(())), rounded)
