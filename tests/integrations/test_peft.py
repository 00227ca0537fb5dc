"""LoRA adapters of peft: only they are trained and have state, however many frozen weights stand
beside them in a group."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.integrations
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import hf_trainer_muon
import peft_lora as example
from comparing import Weights, assert_same_bits, assert_same_training, weights_of

from lather.optim import SOAP, Muon, parameter_groups
from lather.optim.batched.formats import packed_shape

STEPS = 8


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    pytest.importorskip("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_the_adapters_take_the_steps_that_they_take_alone() -> None:
    model = example.make_model()
    before = weights_of(model)
    optimizer, schedule = example.make_optimizer(model)
    losses = example.train(model, optimizer, schedule, range(STEPS))
    assert losses[-1] < losses[0]
    after, names = weights_of(model), trained_names(model)
    assert all(".lora_" in name for name in names)
    assert all(torch.equal(after[name], before[name]) for name in after.keys() - names)
    assert {name for name, p in model.named_parameters() if optimizer.state.get(p)} == names

    def plain(factor: float) -> Weights:
        alone = example.make_model()
        optimizer = Muon(
            [p for p in alone.parameters() if p.requires_grad], lr=factor * 1e-2, momentum=0.9
        )
        example.train(
            alone,
            optimizer,
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, example.STEPS),
            range(STEPS),
        )
        return weights_of(alone)

    assert_same_training(after, plain, 0.0)


def test_saved_adapters_and_optimizer_go_on_to_the_bit(tmp_path: Path) -> None:
    whole = example.make_model()
    optimizer, schedule = example.make_optimizer(whole)
    example.train(whole, optimizer, schedule, range(STEPS // 2))
    whole.save_pretrained(tmp_path)
    torch.save([optimizer.state_dict(), schedule.state_dict()], tmp_path / "optimizer.pt")
    example.train(whole, optimizer, schedule, range(STEPS // 2, STEPS))

    second = peft.PeftModel.from_pretrained(example.make_base(), tmp_path, is_trainable=True)
    made = example.make_optimizer(second)
    for one, saved in zip(
        made, torch.load(tmp_path / "optimizer.pt", weights_only=True), strict=True
    ):
        one.load_state_dict(saved)
    example.train(second, *made, range(STEPS // 2, STEPS))
    assert_same_bits(weights_of(whole), weights_of(second))


def test_another_adapter_takes_over() -> None:
    """`set_adapter` freezes the first adapter and thaws the second, which gets its state then."""
    model = example.make_model()
    model.add_adapter("second", model.peft_config["default"])
    optimizer, schedule = example.make_optimizer(model)
    example.train(model, optimizer, schedule, range(2))
    first, before = trained_names(model), weights_of(model)
    model.set_adapter("second")
    example.train(model, optimizer, schedule, range(2))
    second, after = trained_names(model), weights_of(model)
    assert not first & second
    assert {name for name in after if not torch.equal(after[name], before[name])} <= second
    assert {
        name for name, p in model.named_parameters() if optimizer.state.get(p)
    } == first | second


def test_soap_keeps_the_short_side_of_an_adapter_alone() -> None:
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(128, 128)), peft.LoraConfig(r=4, target_modules=["0"])
    )
    optimizer = SOAP(parameter_groups(model), lr=1e-3)
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    factors = [
        tuple(x.shape)
        for state in optimizer.state.values()
        for key, x in state.items()
        if key.startswith("factor")
    ]
    assert factors == [packed_shape(4), packed_shape(4)]


def test_adapters_under_the_hugging_face_trainer(tmp_path: Path) -> None:
    def trainer(folder: Path) -> hf_trainer_muon.MuonTrainer:
        length = {
            "max_steps": STEPS,
            "save_steps": STEPS // 2,
            "per_device_train_batch_size": 16,
            "report_to": "none",
            "use_cpu": True,
        }
        arguments = transformers.TrainingArguments(
            str(folder), learning_rate=1e-1, lr_scheduler_type="cosine", disable_tqdm=True, **length
        )
        return hf_trainer_muon.MuonTrainer(
            example.make_model(), arguments, train_dataset=hf_trainer_muon.make_rows()
        )

    whole = trainer(tmp_path)
    whole.train()
    second = trainer(tmp_path / "second")
    second.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{STEPS // 2}")
    assert_same_bits(weights_of(whole.model), weights_of(second.model))
    assert len(whole.optimizer.optimizer.state) == len(trained_names(whole.model)) > 0
