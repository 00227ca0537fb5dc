"""Judges parameters by their names, by the customs of published models.

A name is divided into parts at its dots, and a part into words at underscores and capitals, without
trailing digits: `blocks.0.relPos_h` has the words rel, pos and h in its last part. A word says
either that the parameter is a factor of a matrix product, or that it is none.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Judgment(NamedTuple):
    """The kind of a parameter, and why."""

    kind: str
    reason: str
    is_guess: bool = False


PRODUCT = Judgment("matrices", "its name says matrix product")
WEIGHT = Judgment("matrices", "its name says weight")
"""The judgment of a parameter that is called weight, which means little without its module."""


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


def _reasons(groups: Mapping[str, str]) -> Mapping[str, str]:
    """Return the reason for each word."""
    return MappingProxyType({word: why for why, words in groups.items() for word in words.split()})


PRODUCTS = _words(
    "proj projs projection projections kernel kernels wq wk wv wo wi wqkv qkv kv",
    "fc linear dense matrix w",
)
"""Last words of factors of matrix products, whatever their shape. w is also the width of a table of
positions."""
LIKELY_PRODUCTS = PRODUCTS | {"up", "down", "gate", "router", "weight", "weights"}
"""Last words of factors of matrix products that have two dims longer than 1."""
OF_A_VECTOR = _reasons(
    {
        "its name says bias": "bias biases",
        "its name says normalization": "norm norms layernorm rmsnorm ln",
        "its name says scale": "scale scales gain gamma beta temperature lambda layerscale",
    }
)
"""Words for one number for each row, whatever the shape, also in stacks of experts."""
OF_A_TABLE = _reasons(
    {
        "its name says positions": "pos position positions positional rel relative wpe",
        "its name says embedding": "emb embed embeds embedding embeddings wte codebook codebooks",
    }
)
"""Words for a table of which a step reads a few rows."""
OF_NO_WEIGHT = MappingProxyType({**OF_A_VECTOR, **OF_A_TABLE})
"""Words that hold whatever follows them, but for a product's word: `pos_weight` is no matrix."""
OF_OTHERS = _reasons(
    {
        "its name says tokens": "token tokens cls prompt prompts register registers probe",
        "its name says sinks of attention": "sink sinks",
        "its name says queries or latents": "query queries latent latents",
        "its name says state space": "log logs dt decay time",
    }
)
"""Words for other parameters that no activation is multiplied with as a matrix."""
TOKENS = frozenset(word for word, why in OF_OTHERS.items() if why.endswith("tokens"))
AMBIGUOUS = frozenset({"query"})
"""Words of `OF_OTHERS` that name matrices, too."""
STATE_SPACE = frozenset({"A_log", "A_logs", "D", "Ds"})
"""Whole parts that name a state space model's diagonals."""
HEADS = _words("output output_layer output_projection embed_out proj_out")
"""Names of modules that often are the output head, outside of stacks of layers."""
LAST_WORDS_OF_HEADS = frozenset({"head", "classifier", "score", "logits", "unembed"})
"""Last words of the names of output heads."""
EXPERTS = frozenset({"expert", "experts", "moe"})
"""Words for experts, of whose weights the caller did not name the stacks."""
WRAPPERS = _words(
    "weight module model default base_layer modules_to_save original_module _orig_mod",
)
"""Parts of names that wrappers add, and parts that say nothing."""
_LOW_RANK = re.compile(r"lora[._](a|b|up|down)(?![a-z0-9])", re.IGNORECASE)
_NEW_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def words_of(part: str) -> list[str]:
    """Divide a part of a name into words in lower case, without trailing digits."""
    words = _NEW_WORD.sub("_", part).lower().split("_")
    return [word.rstrip("0123456789") or word for word in words if word]


def has_parts(name: str, candidates: Iterable[str]) -> str | None:
    """Return the first candidate whose parts stand together in `name`, None if there is none. A
    candidate is a part, `lm_head`, or several parts, `mlp.gate.weight`."""
    return next((parts for parts in candidates if f".{parts}." in f".{name}."), None)


def judge(path: str) -> Judgment | None:
    """Judge a parameter of two dims or more by its name alone, None if the name says nothing.

    `path` is the name inside of the module that owns the parameter: several parts if the parameter
    is in a list or a dictionary. The last part that says something decides.
    """
    for part in reversed(path.split(".")):
        if part in STATE_SPACE:
            return Judgment("rest", "its name says state space")
        if (judgment := _judge_part(part)) is not None:
            return judgment
    return None


def _judge_part(part: str) -> Judgment | None:
    words = words_of(part)
    if not words:
        return None
    word = _first(words, OF_NO_WEIGHT)
    if words[-1] in PRODUCTS and (words[-1] != "w" or word is None):
        return PRODUCT
    if word is not None:
        return Judgment("rest", OF_NO_WEIGHT[word])
    if words[0] == "w":
        return PRODUCT
    if words[-1] in ("weight", "weights"):
        return WEIGHT
    if "query" in words and not {"key", "value"}.isdisjoint(words):
        return PRODUCT  # the projections of attention in one matrix
    if (word := _first(sorted(words, key=AMBIGUOUS.__contains__), OF_OTHERS)) is not None:
        last = next((x for x in reversed(words) if not x.isdigit()), word)
        is_other = last not in OF_OTHERS and word in TOKENS  # a token_mixer is no token
        return Judgment("rest", OF_OTHERS[word], word in AMBIGUOUS or is_other)
    return PRODUCT if LIKELY_PRODUCTS.intersection(words) else None


def _first(words: Iterable[str], known: Container[str]) -> str | None:
    return next((word for word in words if word in known), None)


def judge_module(part: str) -> Judgment | None:
    """Judge `part.weight`, of a module of unknown class, by the module's name; a guess."""
    words = words_of(part)
    if not words or words[-1] in PRODUCTS:
        return None
    if (word := _first(words, OF_NO_WEIGHT)) is None:
        return None
    return Judgment("rest", OF_NO_WEIGHT[word].replace("its name", "its module's name"), True)


def is_low_rank(name: str) -> bool:
    """Whether a name says that a parameter is a factor of a low-rank adapter (LoRA)."""
    return _LOW_RANK.search(name) is not None


def is_product(name: str) -> bool:
    """Whether a name says that a parameter with one dim longer than 1 is a matrix nevertheless."""
    if is_low_rank(name):
        return True
    *modules, part = name.split(".")
    last = (words_of(part) or [""])[-1]
    if part == "weight" and modules:
        module = words_of(modules[-1])
        is_linear = _first(module, PRODUCTS | {"gate", "router"}) is not None
        return is_linear and _first(module, OF_NO_WEIGHT) is None
    return last in PRODUCTS


def is_weight(path: str) -> bool:
    """Whether the name of a parameter of a linear map says that it is the map's weight.

    `weight_g`, the lengths of weight normalization, and scales of quantized weights are none.
    """
    words = [word for part in path.split(".") for word in words_of(part)]
    is_other = words[-1:] == ["g"] or _first(words, OF_A_VECTOR) is not None
    return not is_other and not {"weight", "weights", "kernel"}.isdisjoint(words)


def may_be_head(name: str) -> bool:
    """Whether the weight of a linear map may be the output head's."""
    parts = name.split(".")
    if any(part.isdigit() for part in parts):
        return False
    last = next((part for part in reversed(parts) if part not in WRAPPERS), "")
    return last in HEADS or not LAST_WORDS_OF_HEADS.isdisjoint(words_of(last)[-1:])


def may_be_experts(name: str) -> bool:
    """Whether a stack of matrices may be that of experts, by any part of its name."""
    return any(word in EXPERTS for part in name.split(".") for word in words_of(part))
