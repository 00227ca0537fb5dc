"""The time model: how long kernels take on a device, by kind of kernel."""
