"""LoRA adapters of peft, trained with Muon.

    python examples/integrations/peft_lora.py        (seconds on a CPU)

Only the adapters have gradients, and only they get optimizer state. After half of the steps
adapters and optimizer are saved, loaded beside a fresh base model, and go on. Prints the loss at
the start, in the middle and at the end, and bytes of state per weight trained."""

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from lather.optim import Muon, parameter_groups

STEPS = 40


def make_base():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    return Qwen3ForCausalLM(
        Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    )


def make_model():
    return get_peft_model(make_base(), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def make_optimizer(model):
    optimizer = Muon(parameter_groups(model), lr=1e-2, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def batch(step):
    """Make sequences that count up in steps of 1 to 4."""
    rows = torch.arange(4)[:, None] * 7 + step % 4
    return (rows + (rows % 4 + 1) * torch.arange(16)) % 64


def train(model, optimizer, schedule, steps):
    losses = []
    for step in steps:
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    model = make_model()
    optimizer, schedule = make_optimizer(model)
    losses = train(model, optimizer, schedule, range(STEPS // 2))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        torch.save([optimizer.state_dict(), schedule.state_dict()], f"{folder}/optimizer.pt")
        model = PeftModel.from_pretrained(make_base(), folder, is_trainable=True)
        optimizer, schedule = make_optimizer(model)
        for one, saved in zip(
            (optimizer, schedule), torch.load(f"{folder}/optimizer.pt"), strict=True
        ):
            one.load_state_dict(saved)
    losses += train(model, optimizer, schedule, range(STEPS // 2, STEPS))
    size = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        f"loss {losses[0]:.4f} -> {losses[STEPS // 2]:.4f} -> {losses[-1]:.4f}, "
        f"{size / trained:.1f} bytes of state per weight trained"
    )


if __name__ == "__main__":
    main()
