"""The bytes of tokens against the bytes of the texts themselves."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from generation.tokenizers_of_tests import SAMPLES, byte_level, word_pieces
from lather.evaluation.scoring import bytes_per_token


@pytest.mark.parametrize(
    "text", [*SAMPLES, "".join(map(chr, range(1, 400))), "\N{GRINNING FACE}" * 3]
)
def test_bytes_of_byte_level_tokens_add_up_to_the_texts(text: str) -> None:
    tokenizer = byte_level()
    table = bytes_per_token(tokenizer, tokenizer.get_vocab_size())
    tokens = tokenizer.encode(text).ids
    assert int(table[tokens].sum()) == len(text.encode())
    assert int(table[tokens[:-1]].sum()) < len(text.encode())


def test_special_tokens_have_no_bytes_and_other_added_ones_have_theirs() -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens([AddedToken("<|user|>", special=True)])
    tokenizer.add_tokens([AddedToken("é!", normalized=False)])
    table = bytes_per_token(tokenizer, 300)
    assert table.shape == (300,)
    for name, size in {"<|user|>": 0, "<|endoftext|>": 0, "é!": 3}.items():
        assert table[tokenizer.token_to_id(name)] == size
    assert not table[tokenizer.get_vocab_size() :].any(), (
        "tokens that the model has and the tokenizer has not"
    )
    assert bytes_per_token(tokenizer, 100).shape == (100,)


def test_sentence_piece_writes_spaces_and_bytes() -> None:
    table = bytes_per_token(word_pieces(), 8)
    assert table.tolist() == [4, 4, 1, 1, 1, 1, 5, 1]
    assert int(table[[0, 1, 2, 0, 3, 4, 5, 1]].sum()) == len(
        " the cats the\N{CJK UNIFIED IDEOGRAPH-4F60} cat".encode()
    )


def test_word_piece_continues_words_with_a_mark_that_is_no_text() -> None:
    tokenizer = Tokenizer(
        models.WordPiece(vocab={"cat": 0, "##s": 1, "##": 2, "[UNK]": 3}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert bytes_per_token(tokenizer, 4).tolist() == [3, 1, 0, 5]
