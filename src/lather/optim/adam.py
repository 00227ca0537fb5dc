"""The inner Adam, run in whatever coordinates the caller's gradient is in: the kernel under the name that the update rules use."""

from lather.kernels.adam_in_basis import adam_in_basis as adam_update

__all__ = ["adam_update"]
