"""Steps and held-out sets in which nothing is learned; and auxiliary losses, which do not depend on
labels or micro-batches."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lather.checkpoint.folder import list_checkpoints
from lather.checkpoint.reader import open_checkpoint
from lather.config.config import Config, MoEConfig
from lather.config.optim import optim_config
from lather.data.batches import Batch
from lather.data.making import make_dataset
from lather.data.recipe import DataRecipe
from lather.data.sequences import IGNORE_INDEX
from lather.engine.optimizer import build_optimizer
from lather.files import read_rows
from lather.models.decoder import Decoder
from lather.optim import AdamW
from lather.train.display import PlainDisplay
from lather.train.loop import train
from lather.train.outcome import RunOutcome
from lather.train.plot import draw
from lather.train.report import report_data
from tiny_model import VOCAB_SIZE
from train.tiny_steps import state_bits, train_step

MakeModel = Callable[..., Decoder]
MakeConfig = Callable[..., Config]
Tokens = Callable[..., Tensor]

# --- auxiliary losses -----------------------------------------------------------------------------


def uneven(tokens_BS: Tensor, *, with_padding: bool, with_documents: bool) -> Batch:
    """The rows have 2, 11, 0 and 16 labels of 16; with padding they have 16, 12, 3 and 16
    tokens."""
    place_S = torch.arange(16)
    unlearned_BS = place_S < torch.tensor([14, 1, 16, 0])[:, None]
    padding_BS = place_S >= torch.tensor([16, 12, 3, 16] if with_padding else [16] * 4)[:, None]
    labels_BS = tokens_BS[:, 1:].masked_fill(unlearned_BS | padding_BS, IGNORE_INDEX)
    begins_BS = (place_S % 6 == 0) | (padding_BS & ~padding_BS.roll(1, 1))
    more = {"begins_BS": begins_BS} if with_documents else {}
    more |= {"padding_BS": padding_BS} if with_padding else {}
    return Batch(tokens_BS[:, :-1].masked_fill(padding_BS, 0), labels_BS, **more)


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize(("balance", "z_loss"), [(0.3, 0.0), (0.0, 0.3)], ids=["balance", "z-loss"])
def test_auxiliary_losses_do_not_depend_on_micro_batches(
    make_model: MakeModel,
    tokens: Tokens,
    balance: float,
    z_loss: float,
    with_padding: bool,
    with_documents: bool,
) -> None:
    moe = MoEConfig("saved", balance, "sequence", z_loss)
    batch = uneven(tokens(3), with_padding=with_padding, with_documents=with_documents)
    found = []
    for size in (4, 2, 1):
        model = make_model(dtype=torch.float64)
        engine = train_step(model, AdamW(model.parameters()), moe, micro_batch_size=size).engine
        result = engine.launch_gradients(batch).read()[0]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((result, gradients))
    (whole, expected), *others = found
    for result, gradients in others:
        assert result.balance_loss == pytest.approx(whole.balance_loss, rel=1e-12)
        assert result.counts_LE.equal(whole.counts_LE)
        for name, gradient in expected.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12 * scale)


def test_auxiliary_losses_do_not_depend_on_labels(make_model: MakeModel, tokens: Tokens) -> None:
    """The gradient of the auxiliary losses is the difference of the gradients with and without
    them."""
    batch = uneven(tokens(3), with_padding=False, with_documents=False)
    learned = Batch(batch.inputs_BS, tokens(3)[:, 1:])
    moe = MoEConfig(balance_coefficient=0.3, balance_level="sequence", z_loss_coefficient=0.2)
    differences = []
    for labeled in (batch, learned):
        gates = []
        for config in (moe, None):
            model = make_model(dtype=torch.float64)
            optimizer = AdamW(model.parameters(), lr=0.0)
            engine = train_step(model, optimizer, config, micro_batch_size=1).engine
            engine.launch_gradients(labeled)
            gates.append(model.routers()[0].weight.grad.clone())
        differences.append(gates[0] - gates[1])
    torch.testing.assert_close(*differences, rtol=1e-10, atol=1e-14)
    assert differences[0].abs().max() > 1e-4


# --- steps without labels -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["adamw", "soap", "muon"])
def test_a_step_without_labels_changes_nothing(
    make_model: MakeModel,
    tokens: Tokens,
    rule: str,
) -> None:
    """Decay, momentum, moments, bases, their counters, and the biases of the experts stay as they
    are."""
    model = make_model()
    optimizer = build_optimizer(optim_config(rule), model.named_parameters())
    moe = MoEConfig(balance_coefficient=0.1, bias_update_rate=0.1)
    step = train_step(model, optimizer, moe, micro_batch_size=2)
    for number in range(3):
        step(Batch.of_tokens(tokens(number)), 1e-2)
    before = state_bits(model, optimizer)
    groups = [dict(group, params=0) for group in optimizer.param_groups]
    inputs_BS = tokens(3)[:, :-1]
    result = step(Batch(inputs_BS, torch.full_like(inputs_BS, IGNORE_INDEX)), 5e-2)
    assert state_bits(model, optimizer) == before
    assert groups == [dict(group, params=0) for group in optimizer.param_groups]
    assert result.skipped
    assert result.tokens == result.refreshes_done == 0
    assert all(map(math.isnan, (result.loss, result.grad_norm, result.balance_loss)))
    assert all(p.grad is None for p in model.parameters())
    assert not step(Batch.of_tokens(tokens(4)), 1e-2).skipped
    assert state_bits(model, optimizer) != before


def test_the_loss_of_a_held_out_batch_without_labels_is_not_known(
    make_model: MakeModel,
    tokens: Tokens,
) -> None:
    model = make_model()
    engine = train_step(model, AdamW(model.parameters(), lr=0.0), micro_batch_size=2).engine
    inputs_BS = tokens(0)[:, :-1]
    batch = Batch(inputs_BS, torch.full_like(inputs_BS, IGNORE_INDEX))
    assert engine.validation_loss(batch) is None
    assert math.isnan(engine.launch_gradients(batch).read()[0].loss)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def chats(corpus: Path, tmp_path: Path) -> list[str]:
    """Two data sets of conversations with one tokenizer."""
    folders, tokenizer = [tmp_path / "chats", tmp_path / "more"], ""
    for folder in folders:
        source = tmp_path / f"{folder.name}.jsonl"
        for number in range(40):
            user = {"role": "user", "content": f"say {number} {folder.name}"}
            assistant = {"role": "assistant", "content": f"the fox {number}"}
            with source.open("a") as file:
                file.write(json.dumps({"messages": [user, assistant]}) + "\n")
        recipe = DataRecipe(
            (str(source),),
            chat=True,
            vocab_size=VOCAB_SIZE,
            tokenizer=tokenizer,
            holdout_every=2,
        )
        make_dataset(folder, recipe, print)
        tokenizer = str(folder / "tokenizer.json")
    return [str(folder) for folder in folders]


def unlearn(folder: str, split: str) -> None:
    """Rewrite a split so that none of its tokens is learned."""
    for file in Path(folder).glob(f"{split}-*.learned.npy"):
        np.save(file, np.zeros_like(np.load(file)))


def run(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> tuple[RunOutcome, list[dict[str, Any]], list[str]]:
    """Return the outcome, the rows of the metrics, and the lines of the display."""
    outcome = train(config, PlainDisplay(1))
    rows = read_rows(Path(config.run_dir) / "metrics.jsonl")
    return outcome, rows, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_run_that_learns_nothing_ends_with_its_first_weights(
    make_config: MakeConfig,
    chats: list[str],
    packing: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has more steps than may be skipped in a row because they are not finite."""
    for split in ("train", "validation"):
        unlearn(chats[0], split)
    config = make_config(
        data={"path": chats[:1], "packing": packing},
        train={"max_skipped_steps": 2},
        moe={"bias_update_rate": 0.1},
        checkpoint={"every": 1, "keep_best": True, "keep_last": 9},
        log={"expert_load_every": 1},
    )
    outcome, rows, notes = run(config, capsys)
    assert outcome.finished
    assert outcome.validation_losses == [None, None, None]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["tokens"] == 0 and row["skipped"] for row in steps)
    loads = {f"expert_load_{name}" for name in ("min", "max", "entropy")}
    unknown = {"loss", "balance_loss", "grad_norm", *loads}
    assert {row[name] for row in steps for name in unknown} == {None}
    assert not any("expert_load" in row for row in rows)
    assert sum("changed nothing and has no loss" in note for note in notes) == 1
    assert sum("sequences of the held-out set 'chats' is learned" in note for note in notes) == 1
    assert any(note.startswith("step 3/4  skipped: no token to learn") for note in notes)
    checkpoints = list_checkpoints(Path(config.run_dir) / "checkpoints")
    first, *_, last = (open_checkpoint(path).weights() for path in checkpoints)
    assert all(torch.equal(first.read(name), last.read(name)) for name in first.tensors)
    happened = report_data(Path(config.run_dir), [])["happened"]
    assert ["", "steps 1 to 4 were skipped: no token to learn"] in happened


def test_a_set_without_labels_is_no_best_and_leaves_the_others_alone(
    make_config: MakeConfig,
    chats: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unlearn(chats[0], "validation")
    config = make_config(
        data={"path": chats},
        checkpoint={"every": 2, "keep_best": True, "keep_last": 1},
        train={"steps": 6, "validation_sequences": 32},
    )
    outcome, rows, notes = run(config, capsys)
    validations = [row for row in rows if "validation_loss" in row]
    assert outcome.validation_losses == [None] * 4
    assert [row["validation_losses"]["chats"] for row in validations] == [None] * 4
    assert all(row["validation_losses"]["more"] > 0 for row in validations)
    assert "NaN" not in (Path(config.run_dir) / "metrics.jsonl").read_text()
    assert len(list_checkpoints(Path(config.run_dir) / "checkpoints")) == 1, "none is best"
    assert any(note.startswith("step 6: validation loss - (chats -, more ") for note in notes)
    draw([Path(config.run_dir)], tmp_path / "loss.png")


def test_a_run_goes_on_beside_steps_that_learn_nothing(
    make_config: MakeConfig, chats: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the sequences have no label; with two a step, some steps have none, and they cost no
    update."""
    unlearn(chats[0], "train")
    config = make_config(
        data={"path": chats},
        train={"steps": 12, "batch_size": 2, "micro_batch_size": 1, "max_skipped_steps": 1},
    )
    _, rows, notes = run(config, capsys)
    steps = [row for row in rows if "loss" in row]
    nothing = [row for row in steps if not row["tokens"]]
    assert 0 < len(nothing) < 12
    assert [row["skipped"] for row in steps] == [not row["tokens"] for row in steps]
    assert all(row["loss"] > 0 for row in steps if row["tokens"])
    assert sum("changed nothing and has no loss" in note for note in notes) == 1
