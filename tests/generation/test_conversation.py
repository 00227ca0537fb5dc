"""Conversations as prompts: special tokens in templates, and what ends an answer."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer

from generation.tokenizers_of_tests import byte_level
from lather.data.chat import CHATML, ChatTemplate
from lather.errors import DataError
from lather.generation.prompts import ConversationFormat

MESSAGES = [{"role": "user", "content": "one two"}]


def with_special(*names: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.encode_special_tokens = True
    return tokenizer


def test_names_of_special_tokens_are_those_tokens_and_end_the_answer() -> None:
    tokenizer = with_special("<|im_start|>", "<|im_end|>")
    conversation = ConversationFormat(tokenizer, ChatTemplate(CHATML, {}))
    start, end = (tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    tokens = conversation.prompt(MESSAGES)
    assert [token for token in tokens if token in (start, end)] == [start, end, start]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == conversation.text(MESSAGES)
    assert conversation.text(MESSAGES).endswith("<|im_start|>assistant\n")
    assert conversation.stop_tokens == {end}
    assert conversation.stop_texts == ()
    assert tokenizer.encode_special_tokens, "the run's own tokenizer is left as it was"


def test_where_they_are_no_tokens_their_letters_end_it() -> None:
    conversation = ConversationFormat(byte_level(), ChatTemplate(CHATML, {}))
    assert conversation.stop_tokens == frozenset()
    assert conversation.stop_texts == ("<|im_end|>",)


def test_a_template_that_ends_with_the_end_of_text() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if "
        "m.role == 'assistant' else '\n' }}{% endfor %}"
    )
    conversation = ConversationFormat(
        byte_level(), ChatTemplate(source, {"eos_token": "<|endoftext|>"})
    )
    assert conversation.stop_tokens == {byte_level().token_to_id("<|endoftext|>")}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no') }}", "refuses it: no"),
        ("{{ messages[0].content }}", "does not show the assistant"),
        ("{{ x.y.z }}", "refuses"),
    ],
)
def test_templates_without_a_place_for_an_answer_are_refused(source: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ConversationFormat(byte_level(), ChatTemplate(source, {}))
