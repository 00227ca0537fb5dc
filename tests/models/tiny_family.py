"""The table that a family adds to the tests: sizes of tiny models, and values of every field, from
which configurations are drawn. Each family of the registry has one, named TINY, in
`models/configurations/<model_type>.py`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lather.models.rotary import YarnConfig

LEAST_CONFIGURATIONS = 8
COMMON_SIZES: Mapping[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "initializer_range": 0.15,
}
ATTENTION_SIZES: Mapping[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
"""Sizes of grouped-query attention."""
COMMON_VALUES: Mapping[str, Sequence[Any]] = {
    "rope_theta": (10000.0, 50.0),
    "rms_norm_eps": (1e-6, 1e-2),
    "tie_word_embeddings": (False, True),
}
YARN = YarnConfig(4.0, 64, beta_fast=4.0, beta_slow=0.5)
NO_INFLUENCE = frozenset({"max_position_embeddings", "initializer_range"})
"""Fields of every family that the function of a model's weights does not depend on."""


@dataclass(frozen=True)
class TinyFamily:
    """Tiny random configurations of a family, and what tests have to know about it."""

    sizes: Mapping[str, Any]
    """Sizes of the plain model; all differ."""
    values: Mapping[str, Sequence[Any]]
    """Values of single fields, each of which occurs in a configuration."""
    together: Sequence[Sequence[Mapping[str, Any]]] = ()
    """The same for fields whose values depend on each other: lists of alternatives."""
    untouched: Mapping[str, str] = field(default_factory=dict)
    """Fields on which transformers' logits do not depend, or with which it cannot run; and the
    reason."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of our names of parameters, and transformers' text in their place."""
    turned: tuple[str, ...] = ()
    """Ends of the names of the parameters that transformers has transposed."""
    experts: str = ""
    """The field with the number of routed experts; empty: a family without experts."""
    may_be_zero: frozenset[str] = frozenset()
    """The numbers that may be 0; all others are greater."""
    may_be_negative: frozenset[str] = frozenset()
    mesh: Mapping[str, Any] = field(default_factory=dict)
    """Changes with which a model of three or five layers runs on a mesh."""
    wide: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that a GPU's fast paths accept, besides those that `bench/rehearsed_steps.py` has for
    every family."""
    saved_as: str = ""
    """The `model_type` under which transformers saves the twin, if it is another family's."""
    refused: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `config.json`, and values that no model of this family is built with."""

    def alternatives(self) -> list[list[Mapping[str, Any]]]:
        """Return the lists of alternatives of which a configuration takes one each."""
        single = [[{name: value} for value in values] for name, values in self.values.items()]
        return [*single, *map(list, self.together)]

    def configurations(self, seed: str) -> list[dict[str, Any]]:
        """Draw so many configurations that every alternative occurs; each is the changes to
        `sizes`."""
        chance, lists = random.Random(seed), self.alternatives()
        number = max(LEAST_CONFIGURATIONS, *map(len, lists))
        drawn: list[dict[str, Any]] = [{} for _ in range(number)]
        for alternatives in lists:
            places = [place % len(alternatives) for place in range(number)]
            chance.shuffle(places)
            for changes, place in zip(drawn, places, strict=True):
                changes.update(alternatives[place])
        return drawn
