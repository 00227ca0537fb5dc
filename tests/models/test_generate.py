"""Sampling: greedy and random choice, the window, the stop token, several prompts side by side, and
what the cache saves."""

from __future__ import annotations

import pytest
import torch

from lather.models.decoder import Decoder
from lather.models.generate import Continuations, Sampling, generate
from models.tiny import KINDS, tiny_family_model, tiny_model

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(num_hidden_layers=2)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain_greedy(model: Decoder, prompt: list[int], num_tokens: int, context: int) -> list[int]:
    """Read the window again for every token, without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens[-context:]])).logits_BSV[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("context", [1, 4, 8, 100])
def test_temperature_zero_takes_the_most_likely_token_of_each_window(
    model: Decoder, context: int
) -> None:
    """A choice from a single token gives the same text, at any temperature."""
    expected, prompt = plain_greedy(model, PROMPT, 12, context), list(PROMPT)
    assert len(set(expected)) > 1
    assert generate(model, prompt, 12, context=context, temperature=0) == expected
    options = {"temperature": 5.0, "top_k": 1, "generator": seeded()}
    assert generate(model, prompt, 12, context=context, **options) == expected
    assert generate(model, prompt, 0, context=context) == []
    assert prompt == PROMPT


def test_the_seed_fixes_the_text(model: Decoder) -> None:
    texts = [generate(model, PROMPT, 20, context=8, generator=seeded(seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_tokens_are_drawn_from_the_softmax_at_the_given_temperature(model: Decoder) -> None:
    probability = (model(torch.tensor([PROMPT])).logits_BSV[0, -1] / 2.5).softmax(-1)
    draw, n = seeded(), 300
    tokens = [
        generate(model, PROMPT, 1, context=8, temperature=2.5, top_k=0, generator=draw)[0]
        for _ in range(n)
    ]
    share = torch.tensor(tokens).bincount(minlength=37) / n
    assert (
        (share - probability).abs() < 4 * (probability * (1 - probability) / n).sqrt() + 1 / n
    ).all()


def test_top_k_draws_from_the_k_most_likely_tokens(model: Decoder) -> None:
    likely = model(torch.tensor([PROMPT])).logits_BSV[0, -1].topk(3).indices
    draw = seeded()
    tokens = {
        generate(model, PROMPT, 1, context=8, temperature=10.0, top_k=3, generator=draw)[0]
        for _ in range(60)
    }
    assert tokens == set(likely.tolist())


def test_the_text_ends_before_the_stop_token_but_not_in_the_prompt(model: Decoder) -> None:
    text = generate(model, PROMPT, 12, context=8, temperature=0)
    stopped = generate(model, PROMPT, 12, context=8, temperature=0, stop_token=text[-1])
    assert stopped == text[: text.index(text[-1])]
    stop = next(token for token in PROMPT if token not in text[:4])
    assert generate(model, PROMPT, 4, context=8, temperature=0, stop_token=stop) == text[:4]


def test_a_prompt_longer_than_the_context_is_read_from_its_end(model: Decoder) -> None:
    texts = [
        generate(model, prompt, 9, context=4, generator=seeded())
        for prompt in (PROMPT * 3, [9, 9, *PROMPT])
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("prompt", "context", "culprit"), [([], 8, "prompt"), (PROMPT, 0, "context")]
)
def test_an_empty_prompt_or_window_is_refused(
    model: Decoder, prompt: list[int], context: int, culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        generate(model, prompt, 3, context=context)


# --- the cache and batches ------------------------------------------------------------------------


def lengths_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    read: list[tuple[int, ...]] = []
    original = Decoder.hidden
    monkeypatch.setattr(
        Decoder,
        "hidden",
        lambda self, x, **options: read.append(tuple(x.shape)) or original(self, x, **options),
    )
    return read


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9], [3, 2]]


@pytest.mark.parametrize("context", [3, 8, 12, 100])
@pytest.mark.parametrize("model_type", KINDS)
def test_rows_side_by_side_are_each_row_alone_without_a_cache(
    model_type: str, context: int
) -> None:
    """Prompts are shorter and longer than the context, and texts grow beyond it."""
    model = tiny_family_model(model_type, initializer_range=0.3).double()
    rows = Continuations(model, PROMPTS, context=context, sampling=Sampling(0))
    for _ in range(9):
        assert list(rows.step()) == [0, 1, 2, 3]
    expected = [plain_greedy(model, prompt, 9, context) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 3
    assert [
        tokens[len(prompt) :] for tokens, prompt in zip(rows.tokens, PROMPTS, strict=True)
    ] == expected


def test_every_token_is_read_once_until_the_context_is_full(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = lengths_read(monkeypatch)
    generate(model, PROMPT, 6, context=8)
    assert read == [(1, 5), (1, 1), (1, 1), (1, 1), (1, 8), (1, 8)]


def test_rows_that_end_are_read_no_more_and_leave_the_others_alone(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [plain_greedy(model, prompt, 8, 100) for prompt in PROMPTS]
    stop = next(token for token in alone[0] if token not in alone[1] and alone[0].index(token) > 0)
    read = lengths_read(monkeypatch)
    rows = Continuations(model, PROMPTS[:3], context=100, sampling=Sampling(0), stop_tokens=[stop])
    rows.step()
    rows.end(2)
    while rows.unfinished and len(rows.tokens[1]) < 1 + 8:
        rows.step()
    texts = [tokens[len(prompt) :] for tokens, prompt in zip(rows.tokens, PROMPTS, strict=False)]
    assert texts == [alone[0][: alone[0].index(stop)], alone[1], alone[2][:1]]
    assert [size[0] for size in read] == sorted((size[0] for size in read), reverse=True)
    assert read[-1] == (1, 1)
    assert rows.unfinished == [1]


def test_each_row_draws_from_its_own_generator(model: Decoder) -> None:
    def texts(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        rows = Continuations(
            model,
            prompts,
            context=100,
            sampling=Sampling(2.0),
            generators=[seeded(seed) for seed in seeds],
        )
        for _ in range(8):
            rows.step()
        return rows.tokens

    together = texts(PROMPTS, [5, 6, 7, 8])
    assert together == [
        texts([prompt], [seed])[0] for prompt, seed in zip(PROMPTS, [5, 6, 7, 8], strict=True)
    ]
    assert len({tuple(tokens) for tokens in texts([PROMPT] * 4, [1, 2, 3, 4])}) > 1


def test_top_p_draws_from_the_fewest_tokens_that_have_that_probability() -> None:
    probability = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
    draw = seeded()
    expected = {0.3: {1}, 0.5: {1, 3}, 0.75: {1, 3, 4}, 1.0: {0, 1, 2, 3, 4}}
    for top_p, tokens in expected.items():
        assert {
            Sampling(1.0, 0, top_p).choose(probability.log(), draw) for _ in range(300)
        } == tokens
    # of the two most likely tokens, 1 has 4/7
    assert {Sampling(1.0, 2, 0.5).choose(probability.log(), draw) for _ in range(100)} == {1}
    tokens = [Sampling(1.0, 0, 0.5).choose(probability.log(), draw) for _ in range(400)]
    assert abs(tokens.count(1) / 400 - 4 / 7) < 0.1


def test_choices_that_cannot_be_made_are_refused() -> None:
    bad = [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1)]
    for name, value in (*bad, ("top_p", 0.0), ("top_p", 1.1)):
        with pytest.raises(ValueError, match=f"{name} = {value} is not valid"):
            Sampling(**{name: value})  # type: ignore[arg-type]
