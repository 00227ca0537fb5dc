"""A decoder whose weights stay on disk: the bits of the decoder in memory, for every family, and
what it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lather.models.adapted import add_adapters
from lather.models.decoder import Decoder
from lather.models.entry_names import split_entry
from lather.models.families import ModelConfig, build_model
from lather.models.generate import Continuations, Sampling
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import open_hugging_face
from lather.models.lora import LoraConfig, fresh_adapters
from lather.models.streamed import StreamedDecoder
from lather.models.token_positions import SequenceLayout
from lather.safetensors_file import DTYPE_NAMES, Index, TensorHeader, TensorSource
from models.tiny import FAMILY_SIZES, KINDS, tiny_family_config, tiny_family_model

CPU = torch.device("cpu")
VOCABULARY = min(sizes["vocab_size"] for sizes in FAMILY_SIZES.values())


@dataclass
class Recorded:
    """The tensors of a model as those of a file, with the names of those that were read."""

    model: Decoder
    reads: list[tuple[str, Index]] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, TensorHeader]:
        headers = {}
        for name, x in self._named().items():
            parts = {name: x}
            if ".experts." in name:
                parts = {f"{name}.{number}": part for number, part in enumerate(x)}
            headers |= {
                key: TensorHeader(DTYPE_NAMES[part.dtype], tuple(part.shape))
                for key, part in parts.items()
            }
        return headers

    def read(self, name: str, index: Index = ()) -> Tensor:
        self.reads.append((name, index))
        parameter, at = split_entry(name)
        return self._named()[parameter][at][index].clone()

    def _named(self) -> dict[str, Tensor]:
        return {
            name: x.detach()
            for name, x in (*self.model.named_parameters(), *self.model.named_buffers())
        }


def streamed(
    config: ModelConfig,
    source: TensorSource,
    *,
    lora: LoraConfig | None = None,
    dtype: torch.dtype = torch.float32,
    state_bytes: int = 0,
) -> StreamedDecoder:
    outline = build_model(config, None, torch.device("meta"))
    if lora is not None:
        add_adapters(outline, lora)
    return StreamedDecoder(outline.to(dtype), source, CPU, state_bytes)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


def drawn(model: Decoder, temperature: float) -> list[list[int]]:
    """Continue prompts of several lengths, until the window slides."""
    prompts = [tokens(1, length, length)[0].tolist() for length in (3, 7, 1)]
    generators = [torch.Generator().manual_seed(number) for number in range(3)]
    sampling = Sampling(temperature)
    rows = Continuations(model, prompts, context=11, sampling=sampling, generators=generators)
    for number in range(9):
        rows.step()
        if number == 3:
            rows.end(1)
    return rows.tokens


@torch.no_grad()
@pytest.mark.parametrize("model_type", FAMILY_SIZES)
def test_every_family_has_the_bits_and_texts_of_the_model_in_memory(
    model_type: str, tmp_path: Path
) -> None:
    model = tiny_family_model(model_type).requires_grad_(False)
    config = tiny_family_config(model_type)
    source = Recorded(model)
    ours = streamed(config, source)
    x_BS = tokens(2, 9)
    packed = {"cu_seqlens": torch.tensor([0, 4, 9, 18])}
    padding_BS = torch.zeros(2, 9, dtype=torch.bool)
    padding_BS[0, 5:] = True
    for options in ({}, packed, {"padding_BS": padding_BS}):
        expected, routings = model.hidden(x_BS, **options)
        actual, actual_routings = ours.hidden(x_BS, **options)
        assert torch.equal(actual, expected)
        assert len(actual_routings) == len(routings)
    with ours.ready(ours.lm_head):
        assert torch.equal(ours.lm_head(actual), model.lm_head(expected))
    assert all(p.is_meta for p in ours.parameters()), "everything has been freed"
    assert drawn(ours, 0.0) == drawn(model, 0.0)
    assert drawn(ours, 1.0) == drawn(model, 1.0)
    mtp = tuple(f"layers.{n}." for n, block in enumerate(model.layers) if block.mtp is not None)
    assert not any(name.startswith(mtp) for name, _ in source.reads if mtp)


@torch.no_grad()
@pytest.mark.parametrize("model_type", KINDS)
def test_a_published_folder_in_bf16_has_the_bits_of_the_model_in_bf16(
    model_type: str, tmp_path: Path
) -> None:
    model, config = tiny_family_model(model_type), tiny_family_config(model_type)
    save_hugging_face(model, config, tmp_path / "folder")
    source, config = open_hugging_face(tmp_path / "folder")
    ours = streamed(config, source, dtype=torch.bfloat16)
    model = model.to(torch.bfloat16)
    x_BS = tokens(3, 8)
    assert torch.equal(ours.hidden(x_BS)[0], model.hidden(x_BS)[0])
    assert drawn(ours, 0.0) == drawn(model, 0.0)


@torch.no_grad()
@pytest.mark.parametrize("model_type", KINDS)
def test_batches_go_through_a_block_together(model_type: str) -> None:
    """Each has its own bits, and the model is read once."""
    model, config = tiny_family_model(model_type), tiny_family_config(model_type)
    source = Recorded(model)
    ours = streamed(config, source)
    batches = [tokens(2, 9, 1), tokens(2, 9, 2), tokens(1, 5, 3)]
    states = ours.hidden_of([(x_BS, SequenceLayout(*x_BS.shape, CPU)) for x_BS in batches])
    for x_BS, x_BSD in zip(batches, states, strict=True):
        assert torch.equal(x_BSD, model.hidden(x_BS)[0])
    of_blocks = [name for name, _ in source.reads if name.startswith("layers.")]
    assert len(of_blocks) == len(set(of_blocks))
    width = config.hidden_size * 4
    assert [
        streamed(config, source, state_bytes=n).batches_at_a_time(18) for n in (0, 54 * width)
    ] == [1, 3]


@torch.no_grad()
def test_only_chosen_experts_and_the_tokens_rows_are_read() -> None:
    model, config = tiny_family_model("qwen3_moe"), tiny_family_config("qwen3_moe")
    source = Recorded(model)
    ours = streamed(config, source)
    _, routings = ours.hidden(torch.tensor([[5, 6, 7, 2]]))
    embedding = [index for name, index in source.reads if name == "embed_tokens.weight"]
    assert embedding == [(slice(2, 3),), (slice(5, 8),)]
    for layer, routing in enumerate(routings):
        start = f"layers.{layer}.mlp.experts.down_proj"
        read = {name for name, _ in source.reads if name.startswith(start)}
        assert read == {f"{start}.{expert}" for expert in routing.experts_TK.unique().tolist()}
        assert len(read) < config.num_routed_experts


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama"])
def test_adapters_are_applied_as_in_memory(model_type: str) -> None:
    config, lora = tiny_family_config(model_type), LoraConfig(rank=2)
    model = tiny_family_model(model_type)
    add_adapters(model, lora)
    for name, value in fresh_adapters(model, torch.Generator().manual_seed(3)):
        model.get_parameter(name).copy_(value + 0.1)
    ours = streamed(config, Recorded(model), lora=lora)
    for batch in (tokens(1, 2), tokens(3, 8)):
        assert torch.equal(ours.hidden(batch)[0], model.hidden(batch)[0])


def test_weights_are_freed_also_after_an_error() -> None:
    ours = streamed(tiny_family_config("llama"), Recorded(tiny_family_model("llama")))

    def stop_in_block() -> None:
        with ours.ready(ours.layers[0]):
            assert not any(p.is_meta for p in ours.layers[0].parameters())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop_in_block()
    assert all(p.is_meta for p in ours.parameters())
