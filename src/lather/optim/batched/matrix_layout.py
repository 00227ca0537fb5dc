"""Layouts: how a parameter of any shape becomes a batch of matrices of equal shape, and which
tensors its optimizer state has.

    tensor      a parameter is one tensor
    per_expert  the leading dim of three or more is a batch of independent tensors (experts)
    stacked     three dims (b, m, n) are one matrix, merged along the smaller edge: (m, b*n) if n <=
                m, else (b*m, n)
    elements    the rule is elementwise: every element is a tensor of its own (a scalar), so that
                parameters of any shape share one batch
    rows        the same with moments in int8: every row, along the last dim, is a tensor of its own

Users choose among the first three, and `per_head` (`lather.optim.batched.layouts`); the others
follow from the rule. There is always a batch dim, even if its size is 1.

The keys of a parameter's state are flat: `step`, and the tensors as which the entries that the rule
names (`Rule.state`) are stored (`lather.optim.batched.formats`).

Letters: B batch (experts, elements, or 1), n_i the size of inner dim i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lather.boxes import Box, is_dtensor, local
from lather.kernels.quantized import BLOCK, num_blocks
from lather.optim.batched.formats import CODES, SCALE, EntryFormat, StateEntry, is_coded
from lather.optim.batched.remainders import REMAINDER
from lather.optim.options import name_of
from lather.optim.plain import plain
from lather.optim.rule import Entry, Matrix, Rule

STEP_BYTES = torch.float32.itemsize

NORM = "norm"
"""Name of the entry that holds the Frobenius norm of a matrix at its first step."""


@dataclass(frozen=True)
class Layout:
    """A parameter viewed as a batch: `batch` tensors of shape `inner`, with bases on `dims`.

    Here the parameter is one tensor; the other layouts override what differs."""

    shape: tuple[int, ...]
    """Shape of the parameter, or of this rank's part of it."""
    batch: int
    """Number of independent tensors in it."""
    inner: tuple[int, ...]
    """Shape of each of these tensors."""
    dims: tuple[int, ...]
    """Inner dims that have a basis, ascending."""
    rule: Rule = field(compare=False, repr=False)
    """Rule of these tensors: the rule of the group, or the rule that it returns for them
    (`Rule.on`)."""
    num_dims: int = field(compare=False, repr=False)
    """Number of dims of the whole parameter."""

    batch_dim: ClassVar[int | None] = None
    """Dim of the parameter along which its tensors, which may have different owners, follow each
    other; None if it is not divided."""
    elementwise: ClassVar[bool] = False
    """Whether every element is a tensor of its own."""
    is_joined: ClassVar[bool] = True
    """Whether joining the batches of several parameters gives what joining the parameters gives."""

    @property
    def matrix(self) -> Matrix:
        """The form of these tensors, as an argument of the rule's methods; even for elements,
        `num_dims` is that of the parameter."""
        return Matrix(self.inner, self.num_dims)

    def of_part(self, shape: tuple[int, ...], *, contiguous: bool = True) -> Layout:
        """Return the layout of a part of the parameter: experts, rows of elements, or all of
        it."""
        return self

    def as_batch(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return tensors start to stop of a parameter-shaped `x` as (B, n_0, n_1, ...): a view,
        unless the layout must copy."""
        return x.unsqueeze(0)

    def as_parameter(self, u: Tensor) -> Tensor:
        """Invert `as_batch`: return a view of `u` (B, ...) with the shape that `part` has for the
        same range."""
        return u.squeeze(0)

    def part(self, p: Tensor, start: int, stop: int) -> Tensor:
        """Return the view of the parameter `p` that holds tensors start to stop."""
        return p

    def shape_of(self, entry: StateEntry) -> tuple[int, ...]:
        """Return the shape of an entry in `optimizer.state[p]`: moments have that of the
        parameter."""
        return self.shape if entry.is_moment else entry.shape

    def box_of(self, entry: StateEntry, box: Box) -> Box:
        """Return the box of an entry that belongs to a box of elements of the parameter, under an
        elementwise rule."""
        return box

    @cached_property
    def has_experts(self) -> bool:
        """Whether the tensors are experts with bases of their own; experts without gradient keep
        their statistics."""
        return False

    def shape_with(self, num: int) -> tuple[int, ...]:
        """Return the shape of a part of the parameter that has `num` of its tensors."""
        if self.batch_dim is None or not self.batch:
            return self.shape
        before, after = self.shape[: self.batch_dim], self.shape[self.batch_dim + 1 :]
        return (*before, num * self.shape[self.batch_dim] // self.batch, *after)

    @cached_property
    def is_controlled(self) -> bool:
        """Whether a step depends on sums over whole matrices (`lather.optim.controls`)."""
        return self.rule.controls_matrices and len(self.inner) > 1

    @cached_property
    def keeps_remainder(self) -> bool:
        """Whether the state has what rounding drops from the weights (`weight_rounding`)."""
        return self.rule.weight_rounding == "remainder"

    @cached_property
    def formats(self) -> dict[str, EntryFormat]:
        """Formats of the entries that the rule names, and of the norm at the first step."""
        entries, dtypes = dict(self.rule.state(self.matrix)), self.rule.dtypes
        if self.is_controlled and self.rule.keeps_first_norm:
            entries[NORM] = Entry(())

        def dtype_of(entry: Entry) -> torch.dtype:
            # `layout_of` has decided it for an elementwise rule, by the shape of the parameter
            is_small = not (self.rule.elementwise or is_coded(entry.shape))
            return torch.float32 if is_small and dtypes[entry.kind] in CODES else dtypes[entry.kind]

        formats = {name: EntryFormat.of(name, x, dtype_of(x)) for name, x in entries.items()}
        owners = dict[str, str]()
        for name, form in formats.items():
            for key in form.stored:
                if (other := owners.setdefault(key, name)) != name:
                    raise ValueError(
                        f"the entries {other!r} and {name!r} of the rule "
                        f"{name_of(type(self.rule))!r} would both be stored as {key!r} (codes, "
                        "scales and diagonals of state_dtype int8): rename one of the two, or give "
                        "its group state_dtype=torch.float32"
                    )
        return formats

    @cached_property
    def entries(self) -> dict[str, StateEntry]:
        """The tensors of the state of the matrices by name, without `step` and the remainder."""
        return {key: x for form in self.formats.values() for key, x in form.stored.items()}

    def allocate(self, device: torch.device, batch: int | None = None) -> dict[str, Tensor]:
        """Return the initial state of a batch of tensors, those of the parameter if none is given:
        stacks (B, ...) by name."""
        batch = self.batch if batch is None else batch
        made = (form.allocate(batch, device) for form in self.formats.values())
        return {key: x for stacks in made for key, x in stacks.items()}

    def state_bytes(self, num_ranks: int = 1) -> int:
        """Return the bytes of state of the parameter, including the step counter; if `num_ranks`
        share its rows, those of the rank with the most."""
        sizes = [(self.shape_of(entry), entry.dtype.itemsize) for entry in self.entries.values()]
        if self.keeps_remainder:
            sizes.append((self.shape, torch.int16.itemsize))
        rows = ((-(-shape[0] // num_ranks) if shape else 1) for shape, _ in sizes)
        return STEP_BYTES + sum(
            num_rows * math.prod(shape[1:]) * itemsize
            for num_rows, (shape, itemsize) in zip(rows, sizes, strict=True)
        )

    def formats_of(self, state: Mapping[str, Any]) -> dict[str, EntryFormat]:
        """Return the formats in which a state has the entries of this layout."""
        return {name: form.in_state(state) for name, form in self.formats.items()}

    def stored_in(self, state: Mapping[str, Any]) -> dict[str, StateEntry]:
        """Return the tensors that a state has in its formats, by name."""
        return {
            key: x for form in self.formats_of(state).values() for key, x in form.stored.items()
        }

    def converted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state, or the same rows of each of its tensors, in the formats of this layout;
        the same object if it is. Codes of 8 bits are those nearest to the elements."""
        theirs = self.formats_of(state)
        if theirs == self.formats:
            return state
        result = {key: x for key, x in state.items() if key in {"step", REMAINDER}}
        for name, form in theirs.items():
            stored = {key: state[key] for key in form.stored}
            result |= stored if form == self.formats[name] else _converted(self, form, stored)
        return result

    def check_state(self, state: Mapping[str, Any], what: str) -> None:
        """Raise ValueError unless `state` has the entries and shapes that a parameter of this
        layout has, in any format."""
        stored = self.stored_in(state).items()
        expected = {"step": ()} | {key: self.shape_of(x) for key, x in stored}
        shapes: dict[str, object] = {
            key: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            for key, x in state.items()
            if key != REMAINDER
        }
        if isinstance(plain(state.get("step")), int | float):  # as in torch
            shapes["step"] = ()
        wrong = [key for key in (*expected, *shapes) if expected.get(key) != shapes.get(key)]
        if not wrong:
            return
        key, surplus = wrong[0], [key for key in wrong if key not in expected]
        remedy = ""
        if key in (NORM, *self.rule.optional_entries):
            remedy = f", or, to change the option that {key} belongs to, begin with fresh state"
        elif surplus and (wrong == surplus or not expected.keys() & shapes.keys()):
            names = ", ".join(map(str, surplus))
            remedy = f", or, if an optimizer around this one keeps {names} here, take one with a "
            remedy = f"{remedy}state of its own"
        raise ValueError(
            f"{what} has {key} {shapes.get(key, 'missing')}, expected "
            f"{expected.get(key, 'none')}: it belongs to another parameter or to other "
            f"options; give the same parameters in the same order, with the same options{remedy}"
        )


class ExpertLayout(Layout):
    """The leading dim of the parameter counts independent tensors (experts)."""

    batch_dim = 0

    @cached_property
    def has_experts(self) -> bool:
        return bool(self.dims)

    def of_part(self, shape: tuple[int, ...], *, contiguous: bool = True) -> Layout:
        return replace(self, shape=shape, batch=shape[0])

    def as_batch(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        return x[start:stop]

    def as_parameter(self, u: Tensor) -> Tensor:
        return u

    def part(self, p: Tensor, start: int, stop: int) -> Tensor:
        return p[start:stop]

    def shape_of(self, entry: StateEntry) -> tuple[int, ...]:
        return self.shape if entry.is_moment else (self.batch, *entry.shape)


class StackedLayout(Layout):
    """A parameter (b, m, n) is one matrix, merged along the smaller edge. Moments, which are in the
    eigenbases of the merged matrix, have its shape."""

    is_joined = False

    def as_batch(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        _, m, n = self.shape
        return (x.movedim(0, 1) if n <= m else x).reshape(1, *self.inner)

    def as_parameter(self, u: Tensor) -> Tensor:
        b, m, n = self.shape
        return u.view(m, b, n).movedim(1, 0) if n <= m else u.view(b, m, n)

    def shape_of(self, entry: StateEntry) -> tuple[int, ...]:
        return self.inner if entry.is_moment else entry.shape


class ElementLayout(Layout):
    """Every element of the parameter is a tensor of its own, of no dims."""

    elementwise = True
    is_joined = False

    def of_part(self, shape: tuple[int, ...], *, contiguous: bool = True) -> Layout:
        if contiguous:
            return replace(self, shape=shape, batch=math.prod(shape))
        return Layout(shape, 1, shape, self.dims, self.rule, self.num_dims)

    def as_batch(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        return x.reshape(-1, 1)[start:stop]

    def as_parameter(self, u: Tensor) -> Tensor:
        return u.squeeze(-1)

    def part(self, p: Tensor, start: int, stop: int) -> Tensor:
        return p.view(-1)[start:stop]

    def shape_of(self, entry: StateEntry) -> tuple[int, ...]:
        return (*self.shape[:-1], num_blocks(self.shape[-1])) if entry.is_scale else self.shape


class RowLayout(Layout):
    """Every row of the parameter, along its last dim, is a tensor of its own. A rank that has parts
    of rows has whole blocks of codes."""

    elementwise = True
    is_joined = False

    def of_part(self, shape: tuple[int, ...], *, contiguous: bool = True) -> Layout:
        if contiguous:
            return replace(self, shape=shape, batch=math.prod(shape[:-1]), inner=shape[-1:])
        return Layout(shape, 1, shape, self.dims, self.rule, self.num_dims)

    def as_batch(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        return x.reshape(-1, *self.inner)[start:stop]

    def as_parameter(self, u: Tensor) -> Tensor:
        return u

    def part(self, p: Tensor, start: int, stop: int) -> Tensor:
        return p.view(-1, *self.inner)[start:stop]

    def shape_of(self, entry: StateEntry) -> tuple[int, ...]:
        return (*self.shape[:-1], *entry.shape)

    def box_of(self, entry: StateEntry, box: Box) -> Box:
        if not entry.is_scale:
            return box
        offset, size = box.offset[-1] // BLOCK, num_blocks(box.size[-1])
        return Box((*box.offset[:-1], offset), (*box.size[:-1], size))


def _converted(
    layout: Layout, form: EntryFormat, stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert an entry from the format `form` to that of the layout; parts of DTensors stay where
    they are."""
    new, source = layout.formats[form.name], stored[form.key]
    if new.is_whole or form.is_whole:
        whole = {key: x.full_tensor() if is_dtensor(x) else x for key, x in stored.items()}
        result = new.converted(whole, form)
    else:
        x = form.widened({key: local(value) for key, value in stored.items()})
        result = {new.key: x.new_empty(x.shape, dtype=new.dtype)}
        if new.dtype in CODES:
            result[f"{new.name}{SCALE}"] = x.new_empty(
                *x.shape[:-1], num_blocks(x.shape[-1]), dtype=torch.float32
            )
        new.narrow(x, result)
    if is_dtensor(source):
        from torch.distributed.tensor import distribute_tensor

        from lather.torch_private import dtensor_over  # imports DTensor

        mesh, placements = source.device_mesh, source.placements
        for key, part in result.items():
            if new.is_whole or form.is_whole:
                result[key] = distribute_tensor(part, mesh, placements, src_data_rank=None)
            else:
                like = torch.empty(layout.shape_of(new.stored[key]), device="meta")
                result[key] = dtensor_over(part, mesh, placements, like)
    return result
