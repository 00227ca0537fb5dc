"""Every family of the registry, over random tiny configurations that touch every field: each does
what transformers does, and what the trainer asks of all families.

A family adds a table (`models/configurations/<model_type>.py`). The first configurations are always
tried, the others by `make test-all`; the mesh (tests/distributed/test_engine.py) and the rehearsal
(tests/bench) take their sizes from the same table.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lather.models.adapted import add_adapters, is_adapters
from lather.models.decoder import Decoder
from lather.models.families import FAMILIES, ModelConfig
from lather.models.gated_mlp import MEMORY_MODES
from lather.models.generate import generate
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import model_from_hugging_face, notes_on_config
from lather.models.key_value_cache import KeyValueCache
from lather.models.lora import LoraConfig
from lather.models.saving.weight_gradients import WeightGradients
from models.tiny import (
    FAMILY_TABLES,
    deferring,
    error,
    gradients,
    largest_error,
    random_normal,
    random_tokens,
    same_tensors,
    tiny_family_config,
    tiny_family_model,
)
from models.tiny_family import LEAST_CONFIGURATIONS, NO_INFLUENCE

pytest.importorskip("transformers")
import transformers

from models.twins import (
    TOKENS,
    TOLERANCE,
    actual_results,
    greedy,
    read_back,
    results_of_twin,
    twin,
)

ALWAYS = 2
"""Configurations of each family that are always tried."""
EXACT = 1e-11
"""The largest error between two ways to compute the same in fp64."""
FLAT = 1e-5
"""The largest element of a gradient that is zero but for rounding."""
OF_A_FOLDER = (
    *("_name_or_path", "architectures", "dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Fields that transformers sets when it reads a folder, and those of a tokenizer."""
PROMPT = [3, 1, 4, 1, 5]

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


@dataclasses.dataclass
class Specimen:
    """A configuration of a family, its model and transformers' twin."""

    family: str
    changes: dict[str, Any]

    @functools.cached_property
    def config(self) -> ModelConfig:
        return tiny_family_config(self.family, **self.changes)

    def model(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """Make the model anew; its weights are always the same."""
        return tiny_family_model(self.family, **self.changes).to(dtype)

    @functools.cached_property
    def twin(self) -> nn.Module:
        return twin(self.model(), self.config)

    @functools.cached_property
    def expected(self) -> dict[str, Tensor]:
        """Logits, loss and every gradient of the twin."""
        return results_of_twin(self.twin, self.model(), self.config)


def specimens() -> list[Any]:
    return [
        pytest.param(
            Specimen(family, changes),
            id=f"{family}-{number}",
            marks=[pytest.mark.grid] * (number >= ALWAYS),
        )
        for family, table in FAMILY_TABLES.items()
        for number, changes in enumerate(table.configurations(family))
    ]


@pytest.fixture(scope="module", params=specimens())
def specimen(request: pytest.FixtureRequest) -> Specimen:
    """Make one configuration at a time, so that its tests share what transformers computes."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made: Specimen = dataclasses.replace(request.param)
    return made


OF_EACH_FAMILY = pytest.mark.parametrize("family", FAMILY_TABLES)

# --- the tables -----------------------------------------------------------------------------------


def test_every_family_has_a_table() -> None:
    assert [*FAMILY_TABLES] == [*FAMILIES]


@OF_EACH_FAMILY
def test_the_configurations_touch_every_field(family: str) -> None:
    """Every field of the configuration class is a size or has several values, and every value
    occurs."""
    table, config_class = FAMILY_TABLES[family], FAMILIES[family].config
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    drawn = table.configurations(family)
    assert len(drawn) >= LEAST_CONFIGURATIONS
    values: dict[str, set[str]] = {name: set() for name in fields}
    for changes in drawn:
        config = tiny_family_config(family, **changes)
        for name, seen in values.items():
            seen.add(repr(getattr(config, name)))
    for alternatives in table.alternatives():
        for alternative in alternatives:
            assert any(alternative.items() <= changes.items() for changes in drawn), alternative
    known = {"model_type", *NO_INFLUENCE, *table.untouched}
    assert table.untouched.keys() <= fields.keys()
    untried = {
        name for name in fields.keys() - known if len(values[name]) == 1 and name not in table.sizes
    }
    assert untried == set()


@OF_EACH_FAMILY
def test_every_varied_field_makes_a_difference(family: str) -> None:
    """Among the values of each line of the table, there are two between which the logits, or the
    shapes of the weights, differ in some configuration."""
    table = FAMILY_TABLES[family]
    for alternatives in table.alternatives():
        assert any(
            _are_told_apart(family, base, alternatives) for base in table.configurations(family)
        ), alternatives


def _are_told_apart(
    family: str, base: dict[str, Any], alternatives: Sequence[Mapping[str, Any]]
) -> bool:
    outcomes = [_outcome(family, {**base, **changes}) for changes in alternatives]
    return any(_differ(*pair) for pair in itertools.combinations(outcomes, 2))


def _outcome(family: str, changes: dict[str, Any]) -> tuple[list[Any], Tensor]:
    model = tiny_family_model(family, **changes)
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    with torch.no_grad():
        logits_BSV = model(TOKENS).logits_BSV
    assert logits_BSV is not None
    return shapes, logits_BSV


def _differ(first: tuple[list[Any], Tensor], second: tuple[list[Any], Tensor]) -> bool:
    return first[0] != second[0] or error(first[1], second[1]) > 10 * TOLERANCE


# --- against transformers -------------------------------------------------------------------------


def test_logits_loss_and_every_gradient_are_those_of_transformers(specimen: Specimen) -> None:
    flat = {name for name, result in specimen.expected.items() if result.abs().max() < FLAT}
    assert all(".gate." in name for name in flat)  # that of a lone expert
    assert largest_error(actual_results(specimen.model()), specimen.expected) < (TOLERANCE, "")


def test_greedy_text_with_a_cache_is_that_without_and_that_of_transformers(
    specimen: Specimen,
) -> None:
    model, tokens = specimen.model(), list(PROMPT)
    with torch.no_grad():
        for _ in range(8):
            tokens.append(int(model(torch.tensor([tokens])).logits_BSV[0, -1].argmax()))  # type: ignore[index]
    text = tokens[len(PROMPT) :]
    assert generate(model, PROMPT, 8, context=100, temperature=0) == text
    assert greedy(specimen.twin, PROMPT, 8) == text


def test_an_exported_folder_is_transformers_model_and_comes_back_to_the_bit(
    specimen: Specimen, tmp_path: Path
) -> None:
    model, config = specimen.model(), specimen.config
    save_hugging_face(model, config, tmp_path / "out", max_shard_bytes=20_000)
    theirs = read_back(tmp_path / "out", config)
    assert same_tensors(theirs, specimen.twin)
    expected = specimen.twin.config.to_dict()  # type: ignore[operator, union-attr]
    found = theirs.config.to_dict()  # type: ignore[operator, union-attr]
    assert {name: found[name] for name in expected if name not in OF_A_FOLDER} == {
        name: value for name, value in expected.items() if name not in OF_A_FOLDER
    }
    assert notes_on_config(tmp_path / "out") == []
    again, config_again = model_from_hugging_face(tmp_path / "out")
    assert config_again == config
    assert same_tensors(again, model)


@pytest.mark.parametrize("published", [True, False], ids=["published", "in memory"])
def test_a_folder_of_transformers_comes_in_to_the_bit(
    specimen: Specimen, published: bool, tmp_path: Path
) -> None:
    """In the published form, and in that which transformers has in memory."""
    specimen.twin.save_pretrained(tmp_path / "in", save_original_format=published)  # type: ignore[operator]
    file = tmp_path / "in" / "config.json"
    written = json.loads(file.read_text("utf-8"))
    # transformers has a model of this form under another name
    model_type = FAMILY_TABLES[specimen.family].saved_as or specimen.family
    file.write_text(json.dumps({**written, "model_type": model_type}), "utf-8")
    model, config = model_from_hugging_face(tmp_path / "in")
    assert same_tensors(model, specimen.model())
    with torch.no_grad():
        logits_BSV = model(TOKENS).logits_BSV
    assert logits_BSV is not None
    assert error(logits_BSV, specimen.expected["logits"]) < TOLERANCE
    assert config == tiny_family_config(model_type, **specimen.changes)


@pytest.mark.grid
@OF_EACH_FAMILY
def test_tolerance_rejects_an_error_of_one_percent_in_any_weight(family: str) -> None:
    """In the second configuration; the gate of a lone expert excepted."""
    specimen = Specimen(family, FAMILY_TABLES[family].configurations(family)[1])
    for name, _ in specimen.model().named_parameters():
        if specimen.expected[name].abs().max() < FLAT:
            continue
        model = specimen.model()
        # a norm would hide a common factor
        model.get_parameter(name).data.flatten()[::2].mul_(1.01)
        worst, _ = largest_error(actual_results(model), specimen.expected)
        assert worst > 10 * TOLERANCE, name


@torch.no_grad()
def test_bf16_logits_are_as_near_the_fp32_ones_as_those_of_transformers_are() -> None:
    """Every token goes to all experts, so that rounding cannot change a choice."""
    specimen = Specimen("gpt_oss", {"num_experts_per_tok": 5})
    expected = specimen.model()(TOKENS).logits_BSV
    assert expected is not None
    theirs = specimen.twin.bfloat16()(TOKENS).logits
    errors = [
        (logits.float() - expected).square().mean().sqrt()
        for logits in (specimen.model(torch.bfloat16)(TOKENS).logits_BSV, theirs)
    ]
    assert 1e-4 * expected.std() < errors[0] < 1.25 * errors[1]
    assert errors[0] < 0.02 * expected.std()


# --- what the trainer asks ------------------------------------------------------------------------


def training_results(model: Decoder, seed: int = 0) -> dict[str, Tensor]:
    """Return the loss and the gradients of the parameters that are trained, for one micro-batch
    with every loss."""
    tokens_BS = random_tokens(2, 9, seed=seed)
    for router in model.routers():
        router.takes_z_loss = True
    output = model(tokens_BS, tokens_BS.roll(1, 1), normalizer=18.0)
    assert output.loss is not None
    loss = output.loss + 0.1 * output.balance_loss() + 0.01 * output.z_loss()
    loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), **trained}  # type: ignore[dict-item]


def test_three_memory_modes_are_equal(specimen: Specimen) -> None:
    results = {}
    for memory in MEMORY_MODES:
        model = specimen.model(torch.float64)
        model.set_memory(memory)
        results[memory] = training_results(model)
    for memory in MEMORY_MODES:
        assert largest_error(results[memory], results["reference"]) < (EXACT, ""), memory


def test_packed_documents_are_separate_ones(specimen: Specimen) -> None:
    """Documents of odd lengths, one of a single token and an empty one, in two rows: gradients,
    too."""
    tokens_BS = random_tokens(2, 12)
    bounds = [0, 5, 6, 6, 12, 15, 24]

    def packed(model: Decoder) -> Tensor:
        return model(tokens_BS, cu_seqlens=torch.tensor(bounds)).logits_BSV.flatten(0, 1)  # type: ignore[union-attr]

    def separate(model: Decoder) -> Tensor:
        token_T = tokens_BS.flatten()
        pieces = [token_T[a:b] for a, b in itertools.pairwise(bounds) if b > a]
        return torch.cat([model(piece[None]).logits_BSV[0] for piece in pieces])  # type: ignore[index]

    results = []
    for read in (packed, separate):
        model = specimen.model(torch.float64)
        logits_TV = read(model)
        (logits_TV * random_normal(*logits_TV.shape)).sum().backward()
        results.append({"logits": logits_TV.detach(), **gradients(model)})
    assert largest_error(*results) < (EXACT, "")


def test_tokens_read_in_pieces_with_a_cache_are_those_read_at_once(specimen: Specimen) -> None:
    """Three rows begin at different places; then two of them go on in another order."""
    model, tokens_BS = specimen.model(torch.float64), random_tokens(3, 11)
    padding_B, rows, cache = torch.tensor([0, 4, 2]), [2, 1], KeyValueCache(torch.tensor([0, 4, 2]))

    def read(tokens_BS: Tensor, lengths: list[int]) -> Tensor:
        pieces = tokens_BS.split(lengths, dim=1)
        return torch.cat([model(piece, cache=cache).logits_BSV for piece in pieces], dim=1)  # type: ignore[arg-type]

    with torch.no_grad():
        alone = [
            model(row[None, padding:]).logits_BSV[0]  # type: ignore[index]
            for row, padding in zip(tokens_BS, padding_B.tolist(), strict=True)
        ]
        first = read(tokens_BS[:, :8], [6, 1, 1])
        cache.keep_rows(rows)
        rest = read(tokens_BS[rows, 8:], [1, 2])
    for row, padding in enumerate(padding_B.tolist()):
        assert error(first[row, padding:], alone[row][: 8 - padding]) < EXACT
    for logits_SV, row in zip(rest, rows, strict=True):
        assert error(logits_SV, alone[row][8 - int(padding_B[row]) :]) < EXACT


def test_gradients_put_off_have_the_same_bits(specimen: Specimen) -> None:
    """The weight gradients of two micro-batches are made after both backward passes."""
    at_once, put_off = specimen.model(), specimen.model()
    queue = deferring(put_off)
    for seed in range(2):
        expected, actual = training_results(at_once, seed), training_results(put_off, seed)
    WeightGradients.run(queue.take())
    assert torch.equal(actual["loss"], expected["loss"])
    for name, p in put_off.named_parameters():
        assert torch.equal(p.grad, expected[name]), name  # type: ignore[arg-type]


def adapted_model(specimen: Specimen) -> Decoder:
    """Make a model in which adapters of every weight that can have one, with B other than zero, are
    trained."""
    model = specimen.model(torch.float64)
    add_adapters(model, LoraConfig(rank=3, alpha=4.0, targets=("*",)))
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        p.requires_grad_(is_adapters(name))
        if is_adapters(name):
            nn.init.normal_(p, std=0.2, generator=generator)
    return model


def test_adapters_have_the_gradients_of_the_sum_in_plain_autograd(specimen: Specimen) -> None:
    results = []
    for memory in ("saved", "recompute", "reference"):
        model = adapted_model(specimen)
        model.set_memory(memory)
        results.append(training_results(model))
    assert largest_error(results[0], results[2]) < (EXACT, "")
    assert largest_error(results[1], results[2]) < (EXACT, "")
