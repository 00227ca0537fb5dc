"""The description of a model family: its configuration, its blocks, and the differences between
these and a published Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lather.models.decoder import Block


@dataclass(frozen=True)
class Family:
    """A model family. Its file in `lather.models.families` has everything that is true of it alone.

    A field of its `config.json` is a field of the configuration with the same name, or is described
    here, or is one of `lather.models.hf.known_fields`. A value in `defaults`, `written` and
    `agreeing` may be a function that computes it.
    """

    config: type[Any]
    """A subclass of `FamilyConfig`."""
    block: Callable[[Any, int], Block]
    """Builds the block with this index, counted from 0, of a configuration."""
    architecture: str
    """Name of the model's class in transformers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that may be left out or null, and their values in that case,
    which are transformers'; a function gets the fields that were read."""
    nullable: frozenset[str] = frozenset()
    """Fields of the configuration that must be present and may be null."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that are written, and their values, with which a field that is read must agree;
    a function gets the configuration."""
    agreeing: Mapping[str, Any] = field(default_factory=dict)
    """The same for fields that are not written."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields, and the names that they stand for."""
    ignored: frozenset[str] = frozenset()
    """Fields without influence on training."""
    quantization: str | None = None
    """The `quant_method` of quantized weights that can be read."""
    rope_scaling_required: bool = False
    """True if transformers has another default for `rope_scaling` than none."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of the names of Lather's parameters, and the published text in their place."""
    transposes_experts: bool = False
    """False: each expert's matrices are published by themselves. True: they are stacked and
    transposed, or stacked and packed in MXFP4."""

    @property
    def model_type(self) -> str:
        """Hugging Face name of the family."""
        return str(self.config.model_type)
