"""Without a CUDA device the Triton kernels run in Triton's interpreter, on CPU tensors."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before lather.kernels.*.triton is imported
