"""Checks of versions, devices, disks, clocks and links between ranks, for `lather doctor`."""
