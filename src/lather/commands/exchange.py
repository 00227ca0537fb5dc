"""`lather import MODEL RUN` and `lather export RUN FOLDER`: read models from Hugging Face folders,
and write them."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch

from lather.argument import Argument
from lather.checkpoint.chosen_weights import Weights, chosen_weights
from lather.checkpoint.folder import find_checkpoint
from lather.checkpoint.held import held_checkpoint
from lather.checkpoint.save import write_first_checkpoint
from lather.commands.parsing import parse_arguments, parse_size
from lather.config.config import Config
from lather.config.context_length import LENGTH, SCALING, reaching, with_overrides
from lather.config.fields import build, family_named
from lather.config.loop import Patterns
from lather.config.run_folder import PROVENANCE
from lather.config.toml_file import config_to_toml, folder_of, without_none
from lather.engine.trained_parameters import check_adapters_are_all
from lather.errors import UserError
from lather.files import check_new_folder, complete_folder, read_text, write_json
from lather.hub import CONFIG_FILE, SCHEME, TOKENIZER_FILE, Address, HubError
from lather.lines import fit
from lather.models.families import ModelConfig
from lather.models.hf.hub_model import fetch_model
from lather.models.hf.model_export import copy_companions
from lather.models.hf.model_folder import (
    Reading,
    notes_on_config,
    open_hugging_face,
)
from lather.models.hf.peft_folder import save_peft
from lather.safetensors_file import TensorSource, copy_weights
from lather.train.companions import COMPANION_FOLDER
from lather.train.published_model import published_config
from lather.train.run_config import current_config
from lather.train.trained_model import TrainedModel

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ORIGIN_FILE = "origin.json"
"""File beside the companions of an imported run: the address and commit that it comes from."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary embedding, for longer sequences than the model was trained with."""

    factor: float | None = None
    """Ratio of the new maximal length to the original length; left out: the model stays as it
    is."""
    original_max_position_embeddings: int | None = None
    """Original maximal length, in tokens; left out: that in the model's scaling, or its
    max_position_embeddings."""


@dataclass(frozen=True)
class ImportArguments:
    """Make a run at step 0 from a Hugging Face folder, or from a model of a hub, to generate text,
    to train further, or to export. Its weights become fp32."""

    model: Annotated[str, Argument(positional=True, metavar="MODEL")]
    """Folder with config.json and safetensors, or ORG/NAME or ORG/NAME@REVISION of a hub."""
    run: Annotated[Path, Argument(positional=True, metavar="RUN")]
    """Run directory to create."""
    revision: str = ""
    """Branch, tag or commit of a model of a hub; empty: the main branch."""
    model_type: str = ""
    """Family of the model, module:FAMILY of your own; left out: that which config.json names."""
    ignore_fields: Patterns = ()
    """Fields of config.json that are passed over although they may change the model;
    rope_scaling.KEY for one in another."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    max_position_embeddings: int | None = None
    """Maximal length of a sequence, in tokens; left out: that of config.json, or with
    --rope-scaling.factor that which it reaches."""

    @property
    def reading(self) -> Reading:
        """How config.json is read."""
        return {"model_type": self.model_type, "ignore_fields": self.ignore_fields}


@dataclass(frozen=True)
class ExportArguments:
    """Write a run's model as a Hugging Face folder, with its tokenizer. The run may be training at
    the same time."""

    run: Annotated[str, Argument(positional=True, metavar="RUN")]
    """Run directory, of which the newest checkpoint is exported; or RUN@STEP or RUN@best for
    another one."""
    folder: Annotated[Path, Argument(positional=True, metavar="FOLDER")]
    """Folder to create."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Data type of the written weights; left out: bf16, and fp32 for adapters."""
    max_shard_size: str = "5GB"
    """Maximal size of a file, such as 500MB, 5GB or 4GiB; a larger tensor gets a file of its
    own."""
    step: int = -1
    """Step of the checkpoint; negative: the newest."""
    weights: Weights = "raw"
    """raw: the weights after that step; average: those that the run has averaged
    (train.average_timescale); last:N: the mean of the last N checkpoints."""
    adapter: bool = False
    """Write only the adapters of [lora], in PEFT's format, instead of the model with the adapters
    merged."""
    base: str = ""
    """With --adapter: name or folder of the base model, for PEFT; left out: the folder of
    init_from."""


def import_command(arguments: list[str]) -> None:
    """Create the run; print its folder and the command that trains it further."""
    parsed = parse_arguments(ImportArguments, "lather import", arguments)
    if parsed.model_type:
        family_named(parsed.model_type, "--model-type")
    check_new_folder(parsed.run)
    folder, address = _published(parsed)
    weights, model = open_hugging_face(folder, **parsed.reading)
    model = _extended(parsed, model)
    config = published_config(folder, parsed.run, model, parsed.ignore_fields)
    with complete_folder(parsed.run) as aside:
        write_first_checkpoint(aside / "checkpoints", lambda file: copy_weights(weights, file))
        (aside / COMPANION_FOLDER).mkdir()
        carried = copy_companions(folder, aside / COMPANION_FOLDER)
        shutil.copyfile(folder / CONFIG_FILE, aside / COMPANION_FOLDER / CONFIG_FILE)
        if TOKENIZER_FILE in carried:
            shutil.copyfile(folder / TOKENIZER_FILE, aside / TOKENIZER_FILE)
        if address is not None:
            write_json(aside / COMPANION_FOLDER / ORIGIN_FILE, {"address": str(address)})
        (aside / "config.toml").write_text(config_to_toml(config), "utf-8")
    parameters = sum(torch.Size(shape).numel() for shape in weights.shapes.values())
    print(f"{model.model_type}, {parameters / 1e6:.2f} M parameters")
    notes = [f"note: {note}" for note in notes_on_config(folder, **parsed.reading)]
    if TOKENIZER_FILE not in carried:
        missing = f"no {TOKENIZER_FILE} in {address or folder}"
        notes.append(f"{missing}: `lather generate` needs one in {parsed.run}")
    print("".join(f"{fit(note)}\n" for note in notes), end="")
    if address is not None:
        print(f"from              {address}")
    print(f"run               {parsed.run}")
    run, config_file = (shlex.quote(str(path)) for path in (parsed.run, parsed.run / "config.toml"))
    command = f"lather train {config_file} --init-from {run} --run-dir NEW --data.source FOLDER"
    command += f" --optim.lr {config.optim.peak_lr:g}"
    if config.data.tokenizer:
        print(f"to train further  {command}")
    else:
        print(f"training further needs the model's own tokenizer: {command} --data.tokenizer FILE")


def export_command(arguments: list[str]) -> None:
    """Write the folder and print its name."""
    parsed = parse_arguments(ExportArguments, "lather export", arguments)
    max_shard_bytes = parse_size(parsed.max_shard_size, "--max-shard-size")
    dtype = parsed.dtype or ("fp32" if parsed.adapter else "bf16")
    run, _ = find_checkpoint(parsed.run, parsed.step)
    config = current_config(run)
    if parsed.adapter:
        check_adapters_are_all(config)
    elif parsed.base:
        raise UserError(
            f"--base {parsed.base} applies to adapters only: give --adapter, or leave it out"
        )
    with held_checkpoint(run, lambda: find_checkpoint(parsed.run, parsed.step)[1]) as checkpoint:
        kind = "" if parsed.weights == "raw" else f", {parsed.weights} weights,"
        if parsed.adapter:
            with chosen_weights(run, checkpoint, parsed.weights) as tensors:
                _export_adapters(parsed, config, tensors, dtype)
            print(f"adapters of {checkpoint.name}{kind} in {dtype}")
        else:
            trained = TrainedModel(run, checkpoint, config, parsed.weights)
            trained.export(parsed.folder, EXPORT_DTYPES[dtype], max_shard_bytes)
            with_tokenizer = (parsed.folder / TOKENIZER_FILE).is_file()
            more = "" if with_tokenizer else ", without a tokenizer"
            print(f"{checkpoint.name}{kind} in {dtype}{more}")
    if config.model.transformers_note and not parsed.adapter:
        print(fit(f"note: {config.model.transformers_note}"))
    print(f"folder            {parsed.folder}")


def _export_adapters(
    parsed: ExportArguments, config: Config, weights: TensorSource, dtype: str
) -> None:
    base = parsed.base or _base(config)
    save_peft(
        weights, config.model, config.lora, parsed.folder, base=base, dtype=EXPORT_DTYPES[dtype]
    )
    if not base:
        why = "note: no base model is named"
        print(fit(f"{why}: export the run that init_from names, and give its folder as --base"))


def _base(config: Config) -> str:
    """Return the base model of adapters: the folder of `init_from` or, of a run that was imported
    from a hub and not trained, the name there; empty if neither is known."""
    folder = folder_of(config.init_from) if config.init_from else Path()
    if (folder / CONFIG_FILE).is_file():
        return str(folder.resolve())
    origin = folder / COMPANION_FOLDER / ORIGIN_FILE
    is_untrained = config.init_from and not (folder / PROVENANCE).exists()
    if not is_untrained or not origin.is_file():
        return ""
    return Address.parse(json.loads(read_text(origin))["address"], "model").name


def _published(parsed: ImportArguments) -> tuple[Path, Address | None]:
    """Return the folder of the model to import and, if it was downloaded, its address."""
    folder = Path(parsed.model)
    if folder.is_dir():
        if parsed.revision:
            raise UserError(
                f"--revision {parsed.revision} applies to a model of a hub, but {parsed.model} is "
                "a folder here: leave it out, or give hf://ORG/NAME"
            )
        if len(folder.parts) == 2 and not folder.is_absolute():
            print(fit(f"{parsed.model} is a folder here; hf://{parsed.model} is the hub's model"))
        return folder, None
    try:
        address = Address.parse(parsed.model, "model")
    except HubError:
        raise UserError(
            f"{parsed.model}: neither a folder nor the name of a model: give a folder with "
            f"{CONFIG_FILE} and safetensors, or ORG/NAME of a hub, without a path (--revision for "
            "a branch with a slash)"
        ) from None
    if parsed.revision and address.revision:
        raise UserError(
            f"{parsed.model} names a revision, and so does --revision {parsed.revision}: give one "
            "of them"
        )
    if parsed.revision:
        address = replace(address, revision=parsed.revision)
    try:
        return fetch_model(address, parsed.run, **parsed.reading)
    except HubError as error:
        if parsed.model.startswith(SCHEME):
            raise
        raise HubError(f"{parsed.model}: no such folder here, and {error}") from None


def _extended(parsed: ImportArguments, model: ModelConfig) -> ModelConfig:
    """Return the model with the scaling and the length that the command line gives."""
    given = {
        **{f"model.{SCALING}.{name}": value for name, value in asdict(parsed.rope_scaling).items()},
        f"model.{LENGTH}": parsed.max_position_embeddings,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return reaching(model)
    before = without_none(asdict(reaching(model)))
    return build(type(model), with_overrides({"model": before}, given)["model"], "model.")
