"""The key-value cache against the forward pass that reads all tokens at once: in pieces, in
batches, in fp32 and fp64. (`test_battery.py` has every family.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lather.models.decoder import Decoder
from lather.models.key_value_cache import KeyValueCache
from models.tiny import error, random_tokens, tiny_family_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 with a query latent": ("deepseek_v2", {"q_lora_rank": 9}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
}
LENGTH = 11
PIECES = [[11], [1] * 11, [3, 8], [5, 1, 1, 4], [10, 1]]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    model_type, changes = MODELS[name]
    return tiny_family_model(model_type, **changes).to(dtype)


@torch.no_grad()
def read(model: Decoder, tokens_BS: Tensor, pieces: list[int], cache: KeyValueCache) -> Tensor:
    """Read the tokens in pieces of these lengths; returns the logits of all positions."""
    parts = [model(piece_BS, cache=cache).logits_BSV for piece_BS in tokens_BS.split(pieces, dim=1)]
    return torch.cat(parts, dim=1)  # type: ignore[arg-type]


@torch.no_grad()
def whole(model: Decoder, tokens_BS: Tensor) -> Tensor:
    logits_BSV = model(tokens_BS).logits_BSV
    assert logits_BSV is not None
    return logits_BSV


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_read_in_pieces_have_the_logits_of_one_pass(
    name: str, pieces: list[int], dtype: torch.dtype
) -> None:
    model, tokens_BS = model_of(name, dtype), random_tokens(2, LENGTH)
    expected = whole(model, tokens_BS)
    assert error(read(model, tokens_BS, pieces, KeyValueCache()), expected) < TOLERANCE[dtype]
    # earlier tokens make a difference to this model
    forgetful = read(model, tokens_BS[:, 1:], [LENGTH - 1], KeyValueCache())
    assert error(forgetful, expected[:, 1:]) > 1e-2


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_all_lengths_in_one_batch_are_what_each_is_alone(
    name: str, dtype: torch.dtype
) -> None:
    """The padding, left of the tokens, does not matter; after it two more tokens come one at a
    time."""
    model, tokens_BS = model_of(name, dtype), random_tokens(LENGTH, LENGTH + 2)
    padding_B = torch.arange(LENGTH)
    results = []
    for fill in (0, 7):
        padded_BS = tokens_BS.masked_fill(torch.arange(LENGTH + 2) < padding_B[:, None], fill)
        results.append(read(model, padded_BS, [LENGTH, 1, 1], KeyValueCache(padding_B)))
    assert results[0].isfinite().all()
    for row, padding in enumerate(padding_B.tolist()):
        alone = whole(model, tokens_BS[row : row + 1, padding:])[0]
        for result in results:
            assert error(result[row, padding:], alone) < TOLERANCE[dtype]


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[LENGTH], [3, 1, LENGTH - 4]], ids=str)
def test_padding_left_of_the_tokens_goes_to_no_expert(pieces: list[int]) -> None:
    model, tokens_BS = model_of("gpt_oss"), random_tokens(3, LENGTH)
    padding_B = torch.tensor([0, LENGTH - 1, 4])
    cache, first = KeyValueCache(padding_B), 0
    for piece_BS in tokens_BS.split(pieces, dim=1):
        place_S = torch.arange(first, first + piece_BS.shape[1])
        num_tokens = int((place_S >= padding_B[:, None]).sum())
        for routing in model(piece_BS, cache=cache).routings:
            assert int(routing.count_E.sum()) == num_tokens * routing.experts_TK.shape[1]
        first += piece_BS.shape[1]


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16 weights"])
@pytest.mark.parametrize("name", MODELS)
def test_in_bf16_it_is_as_far_off_as_bf16_is(name: str, autocast: bool) -> None:
    """This holds for most logits: a few change more, because rounding turns a choice of experts."""
    model, tokens_BS = model_of(name, torch.float32), random_tokens(4, LENGTH)
    expected = whole(model, tokens_BS)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model = model if autocast else model.bfloat16()
        narrow = read(model, tokens_BS, [5, 1, 5], KeyValueCache())
    difference = (narrow.float() - expected).abs().flatten()
    assert difference.quantile(0.9) < 0.05 * expected.abs().max()


def test_windows_end_where_they_do_without_a_cache() -> None:
    """A token changes that a window of 4 has left behind: in a model of one layer, which has that
    window, this makes no difference."""
    model = tiny_family_model("gpt_oss", num_hidden_layers=1).double()
    assert model.layers[0].self_attn.window == 4  # type: ignore[union-attr]
    tokens_BS = random_tokens(1, LENGTH)
    changed_BS = tokens_BS.clone()
    changed_BS[0, 3] = (changed_BS[0, 3] + 1) % 37
    before, after = (
        read(model, x_BS, [6, *[1] * 5], KeyValueCache()) for x_BS in (tokens_BS, changed_BS)
    )
    assert torch.equal(before[0, 7:], after[0, 7:])
    assert error(before[0, 6:7], after[0, 6:7]) > 1e-3


def test_latent_attention_remembers_latent_and_rotary_key_alone() -> None:
    model, cache = model_of("deepseek_v2"), KeyValueCache()
    read(model, random_tokens(2, 5), [5], cache)
    shapes = [tuple(room.shape) for room in cache._rooms.values()]
    assert shapes == [(2, 5, 1, 14 + 6)] * len(model.layers)


def test_the_room_grows_seldom_and_keeps_what_is_there() -> None:
    cache, layer = KeyValueCache(), torch.nn.Identity()
    x_BS = torch.arange(40.0).view(1, 40, 1)
    rooms = set()
    for number, piece in enumerate(x_BS.split(1, dim=1), 1):
        cache.length = number
        (grown,) = cache.extend(layer, piece)
        assert torch.equal(grown, x_BS[:, :number])
        rooms.add(grown.untyped_storage().nbytes())
    assert len(rooms) < 8


@pytest.mark.parametrize("length", range(1, 8))
def test_attention_sees_the_same_in_one_piece_or_two(length: int) -> None:
    """The first piece may be longer than the window, or shorter."""
    model, tokens_BS = model_of("gpt_oss"), random_tokens(1, 8)
    expected = whole(model, tokens_BS)
    assert error(read(model, tokens_BS, [length, 8 - length], KeyValueCache()), expected) < 1e-10


def test_misuse_is_refused() -> None:
    model, tokens_BS = model_of("qwen3_moe"), random_tokens(2, 4)
    with pytest.raises(ValueError, match="no_grad"):
        model(tokens_BS, cache=KeyValueCache())
    with torch.no_grad():
        with pytest.raises(ValueError, match="2 rows and the cache's padding 3"):
            model(tokens_BS, cache=KeyValueCache(torch.zeros(3, dtype=torch.int64)))
        with pytest.raises(ValueError, match="cu_seqlens and a cache"):
            model(tokens_BS, cu_seqlens=torch.tensor([0, 8]), cache=KeyValueCache())
