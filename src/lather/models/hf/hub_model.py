"""Models of a Hugging Face hub: which files of a repository are needed, and their download."""

from __future__ import annotations

from glob import escape
from math import prod
from pathlib import Path
from typing import Unpack

from lather.errors import ExchangeError
from lather.files import check_space
from lather.hub import CONFIG_FILE, Address, cache_folder, open_repository
from lather.models.hf.model_export import COMPANIONS
from lather.models.hf.model_folder import Reading, read_config, weight_shapes
from lather.models.hf.safetensors_folder import INDEX_FILE, SINGLE_FILE, read_index


def fetch_model(address: Address, run: Path, **reading: Unpack[Reading]) -> tuple[Path, Address]:
    """Download a model's configuration, tokenizer and safetensors, and nothing else, of which a run
    of fp32 weights is to be made in `run`. Return their folder, and the address with the commit.

    Raises HubError if the repository cannot be read; ExchangeError, before the weights are
    downloaded, if the model is not supported or has no safetensors; UserError if a disk is too
    small.
    """
    repository = open_repository(address)
    address = repository.address
    weights = [name for name in (SINGLE_FILE, INDEX_FILE) if name in repository.sizes][:1]
    for name in (CONFIG_FILE, *(weights or [SINGLE_FILE])):
        if name not in repository.sizes:
            raise ExchangeError(
                f"{address}: has no {name}: give a model with {CONFIG_FILE} and safetensors"
            )
    files = [CONFIG_FILE, *weights, *repository.matching(COMPANIONS)]
    described = repository.fetch([name for name in files if name != SINGLE_FILE])
    shapes = weight_shapes(read_config(described, **reading))
    if weights == [INDEX_FILE]:
        shards = {*read_index(described / INDEX_FILE).values()}
        files += [name for name in repository.sizes if name in shards]
    missing, run_bytes = repository.missing_bytes(files), 4 * sum(map(prod, shapes.values()))
    check_space({cache_folder(): missing, run: run_bytes}, f"{address} and the run")
    return repository.fetch([*map(escape, files)]), address
