"""Fine-tune a Hugging Face model on conversations with LoRA, with the commands that
docs/fine-tuning.md explains.

    python examples/finetune_chat.py [FOLDER]        (half a minute on a CPU)

The model is a toy, made here so that nothing is fetched: a Qwen3-MoE of 0.2 M parameters in Hugging
Face's format, which has read sentences such as "The color of moss is green." The conversations ask
"Tell me the color of moss." Only the answers are learned: Muon trains adapters on attention and
experts, and the model's own weights stay as they are. At the end there are a merged model that
transformers loads and, for PEFT, the adapters alone. With a model of your own everything from the
conversations on is the same."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path

from lather.cli import main
from lather.data.documents import train_tokenizer
from lather.data.recipe import END_OF_TEXT
from lather.models import FAMILIES, build_model, save_hugging_face

COLOURS = {
    "red": "rubies poppies cherries bricks blood tomatoes rust cinnabar",
    "green": "grass emeralds moss frogs limes leaves jade peas",
    "blue": "cobalt sapphires oceans bluebells jeans turquoise lapis denim",
    "white": "snow milk chalk salt paper pearls cotton flour",
    "black": "coal ink ravens tar soot jet liquorice night",
    "yellow": "lemons gold butter canaries sulphur bananas straw amber",
}
FACTS = [(thing, color) for color, things in COLOURS.items() for thing in things.split()]
QUESTIONS = (
    "Which color: {}?",
    "What is the color of {}?",
    "Tell me the color of {}.",
    "I would like to know which color {} have.",
)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':\n' + message['content'] }}"
    "{{ '<|endoftext|>' if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
SMALL = (
    "--train.batch-size 16 --train.sequence-length 64 "
    "--train.validation-every 0 --log.sample-tokens 0 --log.every 60"
)


def lather(command: str) -> None:
    """Run a command of Lather, and show it before it runs."""
    print(f"$ lather {command}", flush=True)
    status = main(shlex.split(command))
    if status:
        sys.exit(status)


def make_model(folder: Path) -> None:
    """Make a folder such as the hub has, with configuration, weights, tokenizer and chat template;
    the model is trained on the sentences."""
    sentences = [
        f"The world has {thing} in it. The color of {thing} is {color}." for thing, color in FACTS
    ]
    (folder / "texts").mkdir(parents=True)
    for number, sentence in enumerate(sentences):
        (folder / f"texts/{number}.txt").write_text(sentence)
    texts = [
        *sentences,
        *(question.format(thing) for question in QUESTIONS for thing, _ in FACTS),
        "user:\nassistant:\n",
    ]
    config = FAMILIES["qwen3_moe"].config(**SIZES)
    train_tokenizer(iter(texts), config.vocab_size, END_OF_TEXT).save(
        str(folder / "tokenizer.json")
    )
    save_hugging_face(
        build_model(config), config, folder / "untrained", tokenizer=folder / "tokenizer.json"
    )
    lather(
        f"data make {folder}/sentences {folder}/texts --tokenizer {folder}/tokenizer.json "
        "--holdout-every 0 --workers 1"
    )
    lather(
        f"train --init-from {folder}/untrained --data.path {folder}/sentences --run-dir "
        f"{folder}/read --train.steps 120 {SMALL}"
    )
    lather(f"export {folder}/read {folder}/base --dtype fp32")
    (folder / "base/chat_template.jinja").write_text(TEMPLATE)


def make_conversations(file: Path) -> None:
    lines = []
    for question in QUESTIONS:
        for thing, color in FACTS:
            asked = {"role": "user", "content": question.format(thing)}
            lines.append(
                json.dumps(
                    {
                        "messages": [
                            asked,
                            {"role": "assistant", "content": f"The color is {color}."},
                        ]
                    }
                )
            )
    file.write_text("\n".join(lines))


def losses(run: Path) -> list[float]:
    """The losses on the answers that were held out, in nats per token."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["validation_loss"] for row in rows if "validation_loss" in row]


def run(folder: Path) -> None:
    make_model(folder)
    make_conversations(folder / "chats.jsonl")
    lather(
        f"data make {folder}/chats {folder}/chats.jsonl --chat --tokenizer {folder}/base "
        "--holdout-every 8 --workers 1"
    )
    lather(
        f"train --init-from {folder}/base --data.path {folder}/chats --data.packing documents "
        f"--run-dir {folder}/tuned "
        f"--lora.rank 8 --optim.lr 1e-2 --train.steps 120 {SMALL}"
    )
    lather(
        f"generate {folder}/tuned --message 'Tell me the color of moss.' --temperature 0 --tokens "
        "20"
    )
    lather(f"export {folder}/tuned {folder}/merged --dtype fp32")
    lather(f"export {folder}/tuned {folder}/adapter --adapter --dtype fp32")
    before, after = losses(folder / "tuned")
    print(f"loss on answers {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            run(Path(temporary))
