"""Computes Newton-Schulz and the scales of its results in NumPy float64, from the rules'
specification alone: see `reference_muon`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

COEFFICIENTS = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
    "cubic": ((1.5, -0.5, 0.0),),
    "hybrid": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
}


def orthogonalize(x: np.ndarray, steps: int = 5, coefficients: str = "quintic") -> Array:
    """Iterate Newton-Schulz on one matrix, on its smaller side; past the end of the sequence its
    last coefficients repeat."""
    x = np.array(x, dtype=np.float64)
    m, n = x.shape
    if m > n:
        return orthogonalize(x.T, steps, coefficients).T
    x = x / (np.linalg.norm(x) or 1.0)
    sequence = COEFFICIENTS[coefficients]
    for i in range(steps):
        a, b, c = sequence[min(i, len(sequence) - 1)]
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def scale_of(shape: Sequence[int], scale: str | float) -> float:
    """The factor by which an orthogonalized matrix of this shape is multiplied."""
    m, n = shape
    if scale == "match_rms_adamw":
        return float(0.2 * np.sqrt(max(m, n)))
    if scale == "spectral":
        return float(np.sqrt(max(1.0, m / n)))
    return float(scale)
