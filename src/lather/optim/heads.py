"""`per_head`: groups in which the heads of attention's matrices are matrices of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from lather.optim.parameter_names import has_parts, is_low_rank
from lather.optim.plain import as_count, is_count

MAX_NAMES_SHOWN = 8

Named = list[tuple[str, nn.Parameter]]


def per_head(
    groups: Iterable[Mapping[str, Any]],
    *,
    rows: Mapping[str, int] | None = None,
    columns: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Return the groups with some matrices moved into groups of their own, in which every head is a
    matrix (`matrix_layout="per_head"`); all other options stay as they are.

    `SOAP(per_head(parameter_groups(model), rows={"q_proj": 64, "k_proj": 64}))` makes a matrix of
    every 64 rows of the weights with these names. A fused weight has one size, too: that of its
    heads, whichever are queries, keys and values. Factors of low-rank adapters stay whole.

    Args:
        groups: groups of (name, parameter) pairs, as `parameter_groups` returns them.
        rows: whole parts of names of matrices (out, in) -> rows of a head.
        columns: the same with columns, for matrices (in, out), such as GPT-2's `c_attn`.

    Raises:
        TypeError: if parameters have no names.
        ValueError: for sizes that are no positive integers by name, a name that fits no matrix, and
            a matrix that two names fit.
    """
    given = {"rows": rows} if columns is None else {"columns": columns}
    if rows is not None:
        given["rows"] = rows
    sizes = {
        (option, part): size
        for option, of_option in given.items()
        for part, size in _checked(option, of_option).items()
    }
    result, unused, names = list[dict[str, Any]](), dict(sizes), list[str]()
    for group in groups:
        whole, divided = Named(), dict[tuple[str, int], Named]()
        for name, p in _named(group["params"]):
            has_heads = p.dim() == 2 and not is_low_rank(name)
            names += [name] if has_heads else []
            fitting = [key for key in sizes if has_heads and has_parts(name, (key[1],))]
            if len(fitting) > 1:
                both = " and ".join(f"{option}[{part!r}]" for option, part in fitting)
                raise ValueError(f"{both} are for the same {name!r}: leave out all but one")
            target = whole
            for key in fitting:
                unused.pop(key, None)
                target = divided.setdefault((key[0], sizes[key]), Named())
            target.append((name, p))
        result += [{**group, "params": whole}] if whole or not divided else []
        for (option, size), named in divided.items():
            heads = {"matrix_layout": "per_head", f"head_{option}": size}
            result.append({**group, "params": named, **heads})
    for option, part in unused:
        raise ValueError(
            f"{option} has {part!r}, which is no whole part of the name of a matrix: give one of "
            f"{_last_parts(names)}, or leave it out"
        )
    return result


def _checked(option: str, sizes: Any) -> Mapping[str, int]:
    """Return the sizes; raise ValueError unless they are positive integers by name."""
    are_sizes = isinstance(sizes, Mapping) and all(
        isinstance(part, str) and is_count(as_count(size), 1) for part, size in sizes.items()
    )
    if not are_sizes or not sizes:
        raise ValueError(
            f"{option}={sizes!r} is not valid: give the number of {option} of a head by the name "
            f"of a matrix, such as {option}={{'q_proj': 64}}"
        )
    return sizes


def _named(params: Iterable[Any]) -> Named:
    params = list(params)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in params):
        raise TypeError(
            "parameters without names have no heads to find: give parameter_groups(model), or "
            "groups of (name, parameter) pairs"
        )
    return params


def _last_parts(names: Iterable[str]) -> str:
    """Return the different last parts of names, for an error."""
    last = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in names)
    shown = list(map(repr, last))
    return ", ".join([*shown[:MAX_NAMES_SHOWN], *["..."] * (len(shown) > MAX_NAMES_SHOWN)])
