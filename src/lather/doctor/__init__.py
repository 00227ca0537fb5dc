"""Checks of versions, devices, disks and links between ranks, for `lather doctor`."""
