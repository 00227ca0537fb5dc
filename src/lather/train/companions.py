"""Companion files of a run's tokenizer and model: chat template, tokenizer settings, generation
settings.

They lie where the weights or the tokenizer came from. A run copies them when it starts, because
those folders may disappear later; an export includes them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lather.config.config import Config
from lather.config.toml_file import folder_of
from lather.data.dataset import MANIFEST, Manifest, read_manifest
from lather.data.documents import load_tokenizer
from lather.errors import DataError
from lather.files import complete_folder, read_text
from lather.hub import CONFIG_FILE, TOKENIZER_FILE
from lather.models.hf.model_export import GENERATION_FILE, copy_companions, token_ids

COMPANION_FOLDER = "huggingface"
"""Folder in the run directory that holds the copies."""
TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"


def companion_folders(run: Path, config: Config) -> Iterator[Path]:
    """Yield the folders that may hold companion files: that of the run, then those that its
    configuration and its data sets name."""
    folders = [run]
    if config.data.tokenizer:
        folders.append(Path(config.data.tokenizer).parent)
    if config.init_from:
        folders.append(folder_of(config.init_from))
    for manifest in manifests(config):
        path = Path(manifest.made_from["recipe"]["tokenizer"] or run)
        folders.append(path if path.is_dir() else path.parent)
    for folder in dict.fromkeys(folders):
        yield from (folder, folder / COMPANION_FOLDER)


def manifests(config: Config) -> list[Manifest]:
    """Return the manifests of those data sets of a run that still exist."""
    folders = [Path(folder) for folder in (*config.data.path, *config.data.validation.values())]
    return [read_manifest(folder) for folder in folders if (folder / MANIFEST).is_file()]


def save_companions(run: Path, config: Config) -> None:
    """Copy the companion files of the run's tokenizer to `COMPANION_FOLDER`, if there are any and
    the folder does not exist yet."""
    target, tokenizer = run / COMPANION_FOLDER, run / TOKENIZER_FILE
    if target.exists() or not tokenizer.is_file():
        return
    names = (TEMPLATE_FILE, SETTINGS_FILE, GENERATION_FILE)
    for folder in companion_folders(run, config):
        has_companions = folder != run and any((folder / name).is_file() for name in names)
        if has_companions and same_tokenizer(folder / TOKENIZER_FILE, tokenizer):
            with complete_folder(target) as aside:
                copy_companions(folder, aside)
                if (folder / CONFIG_FILE).is_file():
                    shutil.copyfile(folder / CONFIG_FILE, aside / CONFIG_FILE)
            return


def generation_ends(run: Path, config: Config) -> list[int]:
    """Return the tokens that end a text by the settings of the model from which a run comes. Its
    tokenizer is the run's. Raises DataError if the settings cannot be read."""
    for folder in companion_folders(run, config):
        has_settings = any((folder / name).is_file() for name in (GENERATION_FILE, CONFIG_FILE))
        if has_settings and (
            folder.parent == run or same_tokenizer(folder / TOKENIZER_FILE, run / TOKENIZER_FILE)
        ):
            return ends_of(folder)
    return []


def ends_of(folder: Path) -> list[int]:
    """Return the `eos_token_id` of a model's folder, one or several, as generation in transformers
    reads them: those of generation_config.json, or of config.json if there are none. Raises
    DataError if they are not tokens."""
    for file in (folder / GENERATION_FILE, folder / CONFIG_FILE):
        ends = token_ids(_read_settings(file)).get("eos_token_id")
        if ends is None:
            continue
        tokens: list[int] = ends if isinstance(ends, list) else [ends]
        if not all(type(token) is int and token >= 0 for token in tokens):
            raise DataError(
                f"{file}: eos_token_id = {ends!r} is not valid: it must be the number of a token, "
                "or a list of numbers"
            )
        return tokens
    return []


def has_template(folder: Path) -> bool:
    """Return whether the folder has a chat template. Raises DataError if its settings cannot be
    read."""
    if (folder / TEMPLATE_FILE).is_file():
        return True
    return bool(_read_settings(folder / SETTINGS_FILE).get("chat_template"))


def _read_settings(file: Path) -> dict[str, Any]:
    """Read a file of JSON; it is empty if it does not exist."""
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(read_text(file)))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file}: not readable ({error}): restore it") from None


def same_tokenizer(file: Path, other: Path) -> bool:
    """Return whether both files exist and encode alike. Their bytes may differ, because training
    rewrites the tokenizer that it is given."""
    if not (file.is_file() and other.is_file()):
        return False
    first, second = (load_tokenizer(path, "restore it").to_str() for path in (file, other))
    return first == second
