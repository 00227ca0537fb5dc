"""The effects of `[moe]` and packed documents on a step; and runs that start from other weights and
another tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from changing_runs import run
from lather.checkpoint.folder import Progress, list_checkpoints
from lather.checkpoint.reader import load_checkpoint
from lather.checkpoint.state import TrainingState
from lather.config.config import Config, MoEConfig
from lather.data.batches import Batch
from lather.engine.engine import build_model
from lather.errors import DataError, RunError
from lather.files import read_rows
from lather.models.decoder import Decoder
from lather.models.document_boundaries import document_boundaries
from lather.models.families.qwen3_moe import Qwen3MoeConfig
from lather.optim import AdamW
from lather.train.metrics import expert_load_row
from train.tiny_steps import CPU, gradients_of_step, train_step

MakeModel = Callable[..., Decoder]
MakeConfig = Callable[..., Config]
Tokens = Callable[..., Tensor]


def step_of(model: Decoder, moe: MoEConfig, tokens_BS: Tensor, end: int | None = None) -> Any:
    """Return gradients and result of a step of two micro-batches."""
    return gradients_of_step(model, tokens_BS, moe, end=end, micro_batch_size=2)


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12
) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max())
        )


@pytest.mark.parametrize("memory", ["saved", "recompute"])
def test_memory_modes_give_the_gradient_of_plain_autograd(
    make_model: MakeModel, tokens: Tokens, memory: str
) -> None:
    batch = tokens(0)
    lean, plain = (
        step_of(make_model(dtype=torch.float64), MoEConfig(mode, balance_coefficient=0.1), batch)
        for mode in (memory, "reference")
    )
    assert_close(lean[0], plain[0])
    assert lean[1].loss == pytest.approx(plain[1].loss, rel=1e-12)


def test_the_z_loss_adds_its_gradient(make_model: MakeModel, tokens: Tokens) -> None:
    batch, model = tokens(0), make_model(dtype=torch.float64)
    without, _ = step_of(model, MoEConfig(balance_coefficient=0.0), batch)
    with_it, _ = step_of(model, MoEConfig(balance_coefficient=0.0, z_loss_coefficient=0.3), batch)
    model.zero_grad()
    for part in batch.split(2):
        output = model(part[:, :-1])
        assert output.z_loss() > 0
        (0.3 * 0.5 * output.z_loss()).backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    assert gradients["layers.1.mlp.gate.weight"].abs().max() > 1e-4
    assert_close(
        with_it, {name: without[name] + gradient for name, gradient in gradients.items()}, 1e-10
    )


def test_balance_levels_differ_and_the_global_batch_starts_anew_each_step(
    make_model: MakeModel, tokens: Tokens
) -> None:
    batch = tokens(0)
    losses = []
    for level in ("micro_batch", "sequence", "global_batch"):
        model, moe = make_model(), MoEConfig(balance_level=level, balance_coefficient=0.1)  # type: ignore[arg-type]
        step = train_step(model, AdamW(model.parameters(), lr=0.0), moe, micro_batch_size=2)
        losses.append([step(Batch.of_tokens(batch), 0.0).balance_loss for _ in range(2)])
    assert len({round(first, 6) for first, _ in losses}) == 3
    assert losses[2][0] == losses[2][1]


def test_loss_free_balancing_moves_the_bias_by_the_rate_after_a_step_that_counted(
    make_model: MakeModel, tokens: Tokens
) -> None:
    model, moe = make_model(), MoEConfig(bias_update_rate=0.25)
    _, result = step_of(model, moe, tokens(0))
    bias = model.routers()[0].e_score_correction_bias
    load = result.counts_LE[0].double()
    assert bias is not None
    assert bias.tolist() == (0.25 * (load.mean() - load).sign()).tolist()
    assert bias.any()
    model.get_parameter("norm.weight").data.fill_(torch.nan)
    assert step_of(model, moe, tokens(0))[1].skipped
    assert bias.tolist() == (0.25 * (load.mean() - load).sign()).tolist()


# --- packed documents -----------------------------------------------------------------------------


def test_boundaries_are_where_documents_begin() -> None:
    begins_BS = torch.tensor([[False, False, True, False], [True, True, False, True]])
    assert document_boundaries(begins_BS).tolist() == [0, 2, 4, 5, 7, 8]
    assert document_boundaries(begins_BS & False).tolist() == [0, 8]
    assert document_boundaries(begins_BS[:0]).tolist() == [0]


def test_packed_documents_give_the_gradient_of_each_alone(
    make_model: MakeModel, tokens: Tokens
) -> None:
    """Token 0 ends a document after 6 and 11 of 17 tokens; labels are the next tokens, also across
    documents."""
    batch = tokens(0).clamp(min=1)
    batch[:, 5] = batch[:, 10] = 0
    moe = MoEConfig(balance_coefficient=0.0)
    packed, result = step_of(make_model(dtype=torch.float64), moe, batch, end=0)
    crossing, _ = step_of(make_model(dtype=torch.float64), moe, batch)
    model = make_model(dtype=torch.float64)
    loss = sum(
        model(batch[:, a:b], batch[:, a + 1 : b + 1], normalizer=4.0 * 16).loss
        for a, b in ((0, 6), (6, 11), (11, 16))
    )
    loss.backward()
    assert_close(
        packed, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, 1e-10
    )
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert (
        packed["layers.0.self_attn.o_proj.weight"] - crossing["layers.0.self_attn.o_proj.weight"]
    ).abs().max() > 1e-4


# --- whole runs -----------------------------------------------------------------------------------


def run_folder(config: Config) -> Path:
    run(config)
    return Path(config.run_dir)


def validation_losses(run_dir: Path) -> list[float]:
    rows = read_rows(run_dir / "metrics.jsonl")
    return [row["validation_loss"] for row in rows if "validation_loss" in row]


def newest(run_dir: Path) -> dict[str, Tensor]:
    return load_file(list_checkpoints(run_dir / "checkpoints")[-1] / "rank-00000.safetensors")


def test_a_run_keeps_bias_and_load_of_every_expert(make_config: MakeConfig) -> None:
    """There are five steps, because an odd number of moves by the same rate cannot cancel."""
    config = make_config(
        moe={"bias_update_rate": 0.01},
        log={"expert_load_every": 2},
        data={"packed_attention": True},
        train={"steps": 5},
    )
    run_dir = run_folder(config)
    rows = read_rows(run_dir / "metrics.jsonl")
    loads = {row["step"]: row["expert_load"] for row in rows if "expert_load" in row}
    assert list(loads) == [2, 4]
    assert all(len(block) == 4 and sum(block) == pytest.approx(4, abs=1e-3) for block in loads[4])
    bias = newest(run_dir)["layers.1.mlp.gate.e_score_correction_bias"]
    model = build_model(config, CPU)
    load_checkpoint(list_checkpoints(run_dir / "checkpoints")[-1], TrainingState.of_model(model))
    assert bias.any()
    assert torch.equal(model.get_buffer("layers.1.mlp.gate.e_score_correction_bias"), bias)


def test_a_run_of_another_family_is_refused(make_config: MakeConfig) -> None:
    run(make_config())
    other = dataclasses.replace(make_config(), model=Qwen3MoeConfig(vocab_size=264))
    with pytest.raises(
        RunError, match=r"model.model_type is 'deepseek_v2' there and 'qwen3_moe' here and \d+ more"
    ):
        run(other)


@pytest.mark.parametrize(
    ("counts", "loads"),
    [([[1, 2, 3], [0, 0, 9]], [[0.5, 1.0, 1.5], [0.0, 0.0, 3.0]]), ([[0, 0]], [[0.0, 0.0]])],
)
def test_the_load_of_an_expert_is_a_share_of_the_even_load(
    counts: list[list[int]], loads: list[list[float]]
) -> None:
    row = expert_load_row(torch.tensor(counts), Progress(7, 1.5))
    assert row == {"step": 7, "seconds": 1.5, "expert_load": loads}


def test_a_run_starts_from_the_newest_weights_of_another(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """The first one balances with biases, which are not taken over."""
    moe = {"bias_update_rate": 0.1}
    first = run_folder(make_config(run_dir=str(tmp_path / "first"), moe=moe))
    second = run_folder(make_config(run_dir=str(tmp_path / "second"), init_from=str(first), seed=7))
    ends, starts = validation_losses(first), validation_losses(second)
    assert starts[0] == pytest.approx(ends[-1], rel=1e-2)
    assert starts[0] != pytest.approx(ends[0], rel=1e-3)
    assert not any("e_score_correction_bias" in name for name in newest(second))


def test_a_stopped_run_with_balancing_goes_on_to_the_same_bits(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """It is stopped after step 3, when the biases are no longer 0."""
    moe = {"bias_update_rate": 0.01, "balance_level": "global_batch", "z_loss_coefficient": 0.01}
    options: dict[str, Any] = {"moe": moe, "train": {"steps": 7}, "checkpoint": {"every": 10}}
    whole = run_folder(make_config(run_dir=str(tmp_path / "whole"), **options))
    config = make_config(run_dir=str(tmp_path / "stopped"), **options)
    run(config, stop_after=3)
    ends = newest(whole), newest(run_folder(config))
    assert ends[0]["layers.1.mlp.gate.e_score_correction_bias"].any()
    assert ends[0].keys() == ends[1].keys()
    # nothing has seeded this process
    names = [name for name in ends[0] if not name.startswith("random/")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in names)


def test_memory_may_change_when_a_run_goes_on_and_the_rest_of_the_section_may_not(
    make_config: MakeConfig,
) -> None:
    run(make_config(moe={"memory": "saved"}), stop_after=1)
    with pytest.raises(RunError, match=r"moe\.bias_update_rate is 0\.0 there and 0\.5 here"):
        run(make_config(moe={"bias_update_rate": 0.5}))
    run(make_config(moe={"memory": "recompute"}))


def test_a_given_tokenizer_is_used_as_it_is(make_config: MakeConfig, tmp_path: Path) -> None:
    first = run_folder(make_config(run_dir=str(tmp_path / "first")))
    tokenizer = tmp_path / "given.json"
    shutil.copyfile(first / "tokenizer.json", tokenizer)
    data = {"tokenizer": str(tokenizer), "holdout_every": 3}
    second = run_folder(make_config(run_dir=str(tmp_path / "second"), data=data))
    assert json.loads((second / "tokenizer.json").read_text()) == json.loads(tokenizer.read_text())


def test_a_tokenizer_that_does_not_fit_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    first = run_folder(make_config(run_dir=str(tmp_path / "first")))
    for changes, model, message in [
        ({"tokenizer": "missing.json"}, {}, "missing.json: not a usable tokenizer .* must be"),
        ({"end_of_text": "<eos>"}, {}, "end_of_text = '<eos>' is not a token of"),
        ({}, {"vocab_size": 260}, "has token 263, but vocab_size is 260"),
    ]:
        data = {"tokenizer": str(first / "tokenizer.json"), **changes}
        with pytest.raises(DataError, match=message):
            run(make_config(run_dir=str(tmp_path / "second"), data=data, model=model))
        assert not (tmp_path / "second").exists()
