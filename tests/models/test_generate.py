"""Sampling: greedy and random choice, the window, the stop token."""

from __future__ import annotations

import pytest
import torch

from lather.models.decoder import Decoder
from lather.models.families import FAMILIES
from lather.models.generate import generate
from models.tiny import tiny_family_config, tiny_family_model, tiny_model

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(num_hidden_layers=2)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("context", [1, 4, 8, 100])
def test_temperature_zero_takes_the_most_likely_token_of_each_window(model: Decoder, context: int) -> None:
    tokens = list(PROMPT)
    for _ in range(12):
        tokens.append(int(model(torch.tensor([tokens[-context:]])).logits_BSV[0, -1].argmax()))
    assert len(set(tokens[5:])) > 1
    assert generate(model, PROMPT, 12, context=context, temperature=0) == tokens[5:]


def test_top_k_of_one_is_greedy_at_any_temperature(model: Decoder) -> None:
    greedy = generate(model, PROMPT, 12, context=8, temperature=0)
    assert generate(model, PROMPT, 12, context=8, temperature=5.0, top_k=1, generator=seeded()) == greedy


def test_the_seed_fixes_the_text(model: Decoder) -> None:
    texts = [generate(model, PROMPT, 20, context=8, generator=seeded(seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_tokens_are_drawn_from_the_softmax_at_the_given_temperature(model: Decoder) -> None:
    probability = (model(torch.tensor([PROMPT])).logits_BSV[0, -1] / 2.5).softmax(-1)
    draw, n = seeded(), 300
    tokens = [generate(model, PROMPT, 1, context=8, temperature=2.5, top_k=0, generator=draw)[0] for _ in range(n)]
    share = torch.tensor(tokens).bincount(minlength=37) / n
    assert ((share - probability).abs() < 4 * (probability * (1 - probability) / n).sqrt() + 1 / n).all()


def test_top_k_draws_from_the_k_most_likely_tokens(model: Decoder) -> None:
    likely = model(torch.tensor([PROMPT])).logits_BSV[0, -1].topk(3).indices
    draw = seeded()
    tokens = {generate(model, PROMPT, 1, context=8, temperature=10.0, top_k=3, generator=draw)[0] for _ in range(60)}
    assert tokens == set(likely.tolist())


def test_top_k_beyond_the_vocabulary_draws_from_all_of_it(model: Decoder) -> None:
    whole, beyond = (generate(model, PROMPT, 20, context=8, top_k=k, generator=seeded()) for k in (0, 1000))
    assert whole == beyond


def test_the_text_ends_before_the_stop_token(model: Decoder) -> None:
    text = generate(model, PROMPT, 12, context=8, temperature=0)
    stop = text[-1]
    assert generate(model, PROMPT, 12, context=8, temperature=0, stop_token=stop) == text[: text.index(stop)]


def test_a_stop_token_in_the_prompt_does_not_end_the_text(model: Decoder) -> None:
    text = generate(model, PROMPT, 4, context=8, temperature=0)
    stop = next(token for token in PROMPT if token not in text)
    assert generate(model, PROMPT, 4, context=8, temperature=0, stop_token=stop) == text


def test_a_prompt_longer_than_the_context_is_read_from_its_end(model: Decoder) -> None:
    texts = [generate(model, prompt, 9, context=4, generator=seeded()) for prompt in (PROMPT * 3, [9, 9, *PROMPT])]
    assert texts[0] == texts[1]


def test_nothing_is_asked_for_and_the_prompt_is_left_alone(model: Decoder) -> None:
    prompt = list(PROMPT)
    assert generate(model, prompt, 0, context=8) == []
    generate(model, prompt, 3, context=8)
    assert prompt == PROMPT


@pytest.mark.parametrize(("prompt", "context", "culprit"), [([], 8, "prompt"), (PROMPT, 0, "context")])
def test_an_empty_prompt_or_window_is_refused(model: Decoder, prompt: list[int], context: int, culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        generate(model, prompt, 3, context=context)


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_greedy_text_is_that_of_transformers(model_type: str) -> None:
    """Longer than the sliding window, token by token, from a model whose text varies."""
    pytest.importorskip("transformers")
    from models.twins import greedy, twin

    ours = tiny_family_model(model_type, initializer_range=0.3)
    expected = greedy(twin(ours, tiny_family_config(model_type, initializer_range=0.3)), PROMPT, 24)
    assert len(set(expected)) > 2
    assert generate(ours, PROMPT, 24, context=100, temperature=0) == expected
