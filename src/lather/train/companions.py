"""The files that belong to a run's tokenizer and model besides these: chat template, settings, what generation ends with.

They are where the weights or the tokenizer came from. A run keeps a copy from its start, because those places may go, and is exported with
it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from lather.config.config import Config
from lather.config.toml_file import folder_of
from lather.data.dataset import MANIFEST, Manifest, read_manifest
from lather.data.documents import load_tokenizer
from lather.errors import DataError
from lather.files import names_full_disk
from lather.models.hf.model_folder import CONFIG_FILE, TOKENIZER_FILE, copy_companions

COMPANION_FOLDER = "huggingface"
"""Folder of a run with the copy."""
TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"


def companion_folders(run: Path, config: Config) -> Iterator[Path]:
    """The folders in which such files may be: the run's own first, then those that its configuration and its data sets name."""
    folders = [run]
    if config.data.tokenizer:
        folders.append(Path(config.data.tokenizer).parent)
    if config.init_from:
        folders.append(folder_of(config.init_from))
    for manifest in manifests(config):
        path = Path(manifest.made_from.get("recipe", {}).get("tokenizer") or run)
        folders.append(path if path.is_dir() else path.parent)
    for folder in dict.fromkeys(folders):
        yield from (folder, folder / COMPANION_FOLDER)


def manifests(config: Config) -> list[Manifest]:
    """The manifests of the data sets that a run names, as far as they are still there."""
    folders = [Path(folder) for folder in (*config.data.path, *config.data.validation.values())]
    return [read_manifest(folder) for folder in folders if (folder / MANIFEST).is_file()]


def keep_companions(run: Path, config: Config) -> None:
    """Copy such files, of the tokenizer that the run has, into its `COMPANION_FOLDER`, if there is none and they are found."""
    target, own = run / COMPANION_FOLDER, run / TOKENIZER_FILE
    if target.exists() or not own.is_file():
        return
    for folder in companion_folders(run, config):
        is_described = any((folder / name).is_file() for name in (TEMPLATE_FILE, SETTINGS_FILE))
        if folder != run and is_described and same_tokenizer(folder / TOKENIZER_FILE, own):
            aside = run / f".tmp-{COMPANION_FOLDER}"
            shutil.rmtree(aside, ignore_errors=True)
            try:
                with names_full_disk(target):
                    aside.mkdir()
                    copy_companions(folder, aside)
                    if (folder / CONFIG_FILE).is_file():
                        shutil.copyfile(folder / CONFIG_FILE, aside / CONFIG_FILE)
                    aside.rename(target)
            except OSError:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            return


def same_tokenizer(one: Path, other: Path) -> bool:
    """Whether both are there and encode alike; not by their bytes: training writes the tokenizer that it was given anew."""
    read = [load_tokenizer(path, "put it back").to_str() for path in (one, other) if path.is_file()]
    return len(read) == 2 and read[0] == read[1]


def has_template(folder: Path) -> bool:
    """Whether a chat template is in the folder. Raises DataError if that cannot be said."""
    if (folder / TEMPLATE_FILE).is_file():
        return True
    settings = folder / SETTINGS_FILE
    if not settings.is_file():
        return False
    try:
        return bool(json.loads(settings.read_text("utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{settings}: not readable ({error}): restore it") from None
