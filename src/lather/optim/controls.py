"""Controls: options of every rule that tie the step of a matrix to its weights.

With the weights W (m x n), the update U, the Frobenius norm |.| and the weight decay d of the step,
a step with controls does this, in this order:

    keep_norm         U = r U / |U|                              r: the norm that W keeps
    relative_update   U = |W| U / |U|
    radial_brake b    U = U - b min(0, <U, W>) W / |W|^2         -lr U lengthens W if <U, W> < 0
                      W = W - lr U - d W
    cautious_decay        d W without the elements in which U and W have opposite signs
    row_floor f       w_i = w_i max(1, f |W| / (sqrt(m) |w_i|))  for each row w_i
    keep_norm         W = r W / |W|

Cautious decay is from Chen et al., arXiv:2510.12402. Sums over a matrix have the same bits alone as
in a batch, so that steps are the same on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lather.optim.linalg.scale import column, factors_between, norms, norms_of_any_scale
from lather.optim.options import Decay, Fraction, Size
from lather.shapes import Float


@dataclass(frozen=True)
class Controls:
    """Base class of `Rule` with the options that are controls."""

    _: KW_ONLY
    keep_norm: bool = False
    """Keep every matrix W at the Frobenius norm that it had at its first step (hyperball): scale
    the update to that norm, and W back to it after the step. Weight decay is then off. Vectors, and
    matrices that start at zero, are not scaled."""
    weight_rms: Size = None
    """With keep_norm: root mean square of the elements at which every matrix is kept, in place of
    that at its first step."""
    relative_update: bool = False
    """Scale the update of every matrix W to the Frobenius norm of W: lr is then the fraction of its
    norm by which W changes. Vectors, and matrices that start at zero, are not scaled."""
    radial_brake: Fraction = 0.0
    """Fraction of the part of a step along W that is left out, for every matrix W that this part
    would lengthen."""
    cautious_decay: bool = False
    """Leave weight decay out for the elements in which the update and W have opposite signs, also
    for vectors."""
    row_floor: Decay = 0.0
    """Least norm of a row of a matrix, as a fraction of the root mean square of the norms of its
    rows: shorter rows are scaled up to it after the step."""

    @property
    def controls_matrices(self) -> bool:
        """Whether the step of a matrix depends on sums over it, also under an elementwise rule."""
        return self.keeps_first_norm or self.radial_brake > 0 or self.row_floor > 0

    @property
    def keeps_first_norm(self) -> bool:
        """Whether the state has the norm that a matrix had at its first step."""
        return self.keep_norm or self.relative_update


CONTROLS = frozenset(field.name for field in fields(Controls))
"""Options that a group of parameters with a rule of its own does not inherit, nor do the kinds
`rest` and `router` of the trainer: embeddings, heads and routers are controlled only on demand."""


def check_controls(rule: Any) -> None:
    """Raise ValueError for controls of a rule that exclude each other."""
    if rule.weight_rms is not None and not rule.keep_norm:
        raise ValueError(
            f"weight_rms={rule.weight_rms!r} without keep_norm: it is the size at which keep_norm "
            "keeps matrices; set keep_norm=True, or leave weight_rms out"
        )
    for name in ("relative_update", "radial_brake"):
        if rule.keep_norm and (value := getattr(rule, name)):
            raise ValueError(
                f"keep_norm=True with {name}={value!r}: keep_norm already scales the update to the "
                "norm of the matrix, and keeps that norm; leave one of the two out"
            )
    if rule.cautious_decay and rule.weight_decay_method == "l2":
        raise ValueError(
            "cautious_decay=True with weight_decay_method='l2': that decay is a part of the "
            "gradient, not of the step; set weight_decay_method='decoupled', or leave "
            "cautious_decay out"
        )


def merged(inherited: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group: those given in place of those inherited. A group that gives
    `keep_norm=False` does not inherit a `weight_rms`, which belongs to it."""
    options = {**inherited, **given}
    if "weight_rms" not in given and not given.get("keep_norm", True):
        options["weight_rms"] = None
    return options


def stepped(
    w: Float[Tensor, "b *dims"],
    u: Float[Tensor, "b *dims"],
    controls: Controls,
    lr: float,
    decay: float,
    first: Float[Tensor, " b"] | None = None,
) -> Float[Tensor, "b *dims"]:
    """Return the weights after a step with these controls. `decay`: the fraction d; `first`: the
    norm of each matrix at its first step, if the controls need it. Tensors without dims, and
    vectors, have the control of decay alone."""
    is_matrix, decaying, r = u.dim() > 2, w, first
    if first is not None:
        rms = controls.weight_rms
        r = norms(w) if not controls.keep_norm else first
        r = r if rms is None else torch.full_like(r, rms * math.sqrt(w[0].numel()))
        r = r.where(first > 0, 0.0)
        u = scaled(u, r)
    if is_matrix and controls.radial_brake:
        u = braked(u, w, controls.radial_brake)
    if controls.cautious_decay:
        decaying = w.where(u.sign() * w.sign() >= 0, 0.0)
    new = w - lr * u
    if decay:
        new = new - decay * decaying
    if is_matrix and controls.row_floor:
        new = with_row_floor(new, controls.row_floor)
    return scaled(new, r) if controls.keep_norm and r is not None else new


def scaled(x: Float[Tensor, "b *dims"], r: Float[Tensor, " b"]) -> Float[Tensor, "b *dims"]:
    """Return each matrix of x, scaled to the norm r; the same matrix where r is 0."""
    return x * column(factors_between(r, norms_of_any_scale(x)).where(r > 0, 1.0), x)


def braked(
    u: Float[Tensor, "b *dims"], w: Float[Tensor, "b *dims"], brake: float
) -> Float[Tensor, "b *dims"]:
    """Return U without the fraction `brake` of its part along -W."""
    r = norms(w)
    direction = w / column(r.clamp_min(torch.finfo(r.dtype).tiny), w)
    radial = sums(u * direction).clamp_max(0.0)
    return u - column(brake * radial, u) * direction


def with_row_floor(w: Float[Tensor, "b m *dims"], floor: float) -> Float[Tensor, "b m *dims"]:
    """Return W with all rows at least as long as the fraction `floor` of the root mean square of
    the lengths of its rows; rows of zeros stay zero."""
    rows = norms(w.flatten(0, 1)).view(w.shape[:2])
    least = floor / math.sqrt(w.shape[1]) * norms(w)
    return w * column(factors_between(least.unsqueeze(1), rows).clamp_min(1.0), w)


def sums(x: Float[Tensor, "b *dims"]) -> Float[Tensor, " b"]:
    """Return the sum of each matrix of x. A single sum would be divided among threads, and have
    other bits than the same sum in a batch."""
    rows = x.flatten(1)
    return (rows.expand(2, -1) if len(rows) == 1 else rows).sum(1)[: len(rows)]
