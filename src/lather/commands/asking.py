"""A question to a model that was tuned on conversations: put into its chat template, as in training, and answered to the end of a turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lather.commands.exchange import COMPANION_FOLDER
from lather.data.chat import ChatError, ChatTemplate, Messages
from lather.data.dataset import MANIFEST, DataSet
from lather.data.documents import load_tokenizer
from lather.errors import DataError, UserError
from lather.train.config import Config

ANSWER = "\U000f0000"
"""Stands for an answer, to see what the template puts after one."""


def chat_template_of(config: Config, run: Path) -> ChatTemplate:
    """The template beside the tokenizer that conversations were made with, or else the model's own. Raises UserError if there is none."""
    places = [recipe["tokenizer"] for recipe in _recipes(config) if recipe.get("chat") and recipe.get("tokenizer")]
    places += [str(run / COMPANION_FOLDER), config.data.tokenizer, config.init_from]
    for place in places:
        path = Path(place)
        folder = path if path.is_dir() else path.parent
        if place and any((folder / name).is_file() for name in ("chat_template.jinja", "tokenizer_config.json")):
            return ChatTemplate.beside(folder / "tokenizer.json")
    raise UserError(f"--chat: no chat template is beside the tokenizer of {run}: leave out --chat, and give the whole text")


def _recipes(config: Config) -> list[dict[str, Any]]:
    """Those of the data sets that are still there."""
    folders = [Path(path) for path in config.data.path]
    return [DataSet(folder).manifest.made_from.get("recipe", {}) for folder in folders if (folder / MANIFEST).is_file()]


def ask(template: ChatTemplate, run: Path, question: str) -> tuple[list[int], int | None]:
    """The tokens of the question, and the special token that ends an answer, if the template has one.

    Raises DataError if the template refuses the question.
    """
    tokenizer = load_tokenizer(run / "tokenizer.json", "`lather train` with the run's configuration puts it back")
    tokenizer.encode_special_tokens = False  # as in training, the name of a special token is that token
    messages: Messages = [{"role": "user", "content": question}]
    try:
        prompt = template.render(messages, asking=True)
        closing = template.render([*messages, {"role": "assistant", "content": ANSWER}]).partition(ANSWER)[2]
    except ChatError as error:
        raise DataError(f"--prompt {question!r}: {error}") from None
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    ends = [token for token in tokenizer.encode(closing, add_special_tokens=False).ids if token in special]
    return tokenizer.encode(prompt, add_special_tokens=False).ids, ends[0] if ends else None
