"""Tokens to text as they come: nothing is lost, no character is broken, and stop texts end it
wherever they fall."""

from __future__ import annotations

import random

import pytest

from generation.tokenizers_of_tests import SAMPLES, byte_level, word_pieces
from lather.generation.text import MOST_TOKENS, TextStream


def pieces(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*map(stream.push, tokens), stream.rest()]


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("prompt_length", [0, 1, 7])
def test_pieces_add_up_to_the_text(text: str, prompt_length: int) -> None:
    tokenizer = byte_level()
    prompt, tokens = (
        tokenizer.encode(part).ids for part in (text[:prompt_length], text[prompt_length:])
    )
    found = pieces(TextStream(tokenizer, prompt), tokens)
    assert text[:prompt_length] + "".join(found) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in found)
    assert sum(map(bool, found)) >= min(2, len(text) - prompt_length)


def test_whatever_the_tokens_they_become_what_they_decode_to_together() -> None:
    """This holds also for tokens that make no valid UTF-8."""
    tokenizer, draw = byte_level(), random.Random(0)
    for _ in range(200):
        tokens = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(draw.randrange(1, 20))]
        assert "".join(pieces(TextStream(tokenizer), tokens)) == tokenizer.decode(tokens)


def test_a_character_of_several_tokens_comes_whole() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("a\N{GRINNING FACE}b").ids
    assert len(tokens) == 6
    assert pieces(TextStream(tokenizer), tokens) == ["a", "", "", "", "\N{GRINNING FACE}", "b", ""]


def test_half_a_character_at_the_end_is_shown_in_the_end() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("a\N{GRINNING FACE}").ids[:3]
    assert (
        "".join(pieces(TextStream(tokenizer), tokens))
        == tokenizer.decode(tokens)
        == "a\N{REPLACEMENT CHARACTER}"
    )


def test_words_keep_the_space_before_them() -> None:
    tokenizer = word_pieces()
    tokens = [0, 1, 2, 0, 3, 4, 5, 1]
    whole = tokenizer.decode(tokens)
    assert whole == "the cats the\N{CJK UNIFIED IDEOGRAPH-4F60} cat"
    assert "".join(pieces(TextStream(tokenizer), tokens)) == whole
    after = pieces(TextStream(tokenizer, tokens[:2]), tokens[2:])
    assert "the cat" + "".join(after) == whole
    assert after[2:4] == ["", ""]


def test_words_keep_the_space_before_them_after_tokens_without_a_text() -> None:
    tokenizer = word_pieces()
    tokenizer.add_special_tokens(["<call>"])
    call = tokenizer.token_to_id("<call>")
    tokens = [0, call, 1, call, call, 0, 7, 1]
    assert tokenizer.decode(tokens) == "the cat the  cat"
    assert "".join(pieces(TextStream(tokenizer), tokens)) == "the cat the  cat"


def test_tokens_without_a_text_do_not_pile_up() -> None:
    tokenizer = word_pieces()
    tokenizer.add_special_tokens(["<call>"])
    stream = TextStream(tokenizer)
    for _ in range(1000):
        assert stream.push(tokenizer.token_to_id("<call>")) == ""
        assert len(stream._tokens) <= MOST_TOKENS


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        (["END"], "one "),
        (["D t"], "one EN"),
        (["two", "EN"], "one "),
        (["one"], ""),
        (["xyz"], None),
    ],
)
def test_a_stop_text_ends_it_wherever_tokens_end(stop: list[str], left: str | None) -> None:
    tokenizer, text = byte_level(), "one END two"
    stream = TextStream(tokenizer, stop_texts=stop)
    found = pieces(stream, tokenizer.encode(text).ids)
    assert "".join(found) == (text if left is None else left)
    assert stream.stopped == (left is not None)


def test_what_may_begin_a_stop_text_is_held_back_until_it_does_not() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, stop_texts=["<end>"])
    assert pieces(stream, [tokenizer.token_to_id(one) for one in "a<en<e"]) == [
        "a",
        "",
        "",
        "",
        "<en",
        "",
        "<e",
    ]


def test_special_tokens_have_no_text() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|endoftext|>")
    tokens = [*tokenizer.encode("ab").ids, end, *tokenizer.encode("cd").ids]
    assert "".join(pieces(TextStream(tokenizer), tokens)) == "abcd"
