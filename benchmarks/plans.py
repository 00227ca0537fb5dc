"""The memory plans whose numbers the pages quote: each file of benchmarks/results/plans, and the
command that writes it.

    python -m benchmarks.plans [NAME ...]         writes those files again, or all of them: half an
                                                  hour on two cores

They need no GPU and no quiet machine: the same commit plans the same bytes everywhere.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results" / "plans"

QWEN3 = "configs/qwen3-30b-a3b.toml --world 16 --parallel.pp 2 --parallel.ep 8"
QWEN3_WIDE = "configs/qwen3-30b-a3b.toml --world 16 --parallel.pp 4 --parallel.ep 4"
QWEN3_SMALL = "configs/qwen3-30b-a3b.toml --world 8"
QWEN3_NODE = f"{QWEN3_SMALL} --parallel.ep 8"
DEEPSEEK_LITE = "configs/deepseek-v2-lite.toml --world 8 --parallel.ep 8"
GPT_OSS = "configs/gpt-oss-20b.toml --world 8 --parallel.pp 2 --parallel.ep 4"
DEEP_QUICKSTART = (
    "configs/quickstart.toml --world 2 --device cpu --parallel.pp 2 --model.num-hidden-layers 8 "
    "--train.sequence-length 1024 "
    "--train.batch-size 16 --train.micro-batch-size 1 --train.recompute"
)
SMALLER, BF16, INT8, EARLY, BLOCK = (
    "--optim.sides smaller",
    "--optim.state-dtype bfloat16",
    "--optim.state-dtype int8",
    "--parallel.schedule-memory least",
    "--parallel.gather block",
)
LONG_QWEN3 = (
    "configs/qwen3-30b-a3b.toml --world 16 --parallel.cp 8 --parallel.ep 2 --train.batch-size 2 "
    "--model.rope-scaling.factor 4 --model.rope-scaling.original-max-position-embeddings 32768"
)
LONG_LITE = "configs/deepseek-v2-lite.toml --world 8 --parallel.cp 8 --train.batch-size 1"
ALL = "attention experts shared_experts"
ATTENTION = f"{BLOCK} --train.micro-batch-size 1 --train.recompute attention"
ROUNDED, WEIGHTS, GRADIENTS = (
    "--train.rounded-weights block",
    "--train.weight-dtype bfloat16",
    "--train.gradient-dtype bfloat16",
)
LORA = f"configs/qwen3-30b-a3b.toml --world 1 --lora.rank 16 {WEIGHTS} --train.recompute attention"

PUBLISHED_QWEN3 = "configs/qwen3-30b-a3b.toml --parallel.ep 8 --optim.name adamw"
PUBLISHED_LITE = f"{DEEPSEEK_LITE} --train.sequence-length 2048"
PUBLISHED = {
    "published-qwen3-30b-a3b-16": (
        f"{PUBLISHED_QWEN3} --world 16 --parallel.pp 2 --train.sequence-length 2048 {BLOCK}"
    ),
    "published-qwen3-30b-a3b-32": f"{PUBLISHED_QWEN3} --world 32 --parallel.pp 4",
    "published-qwen3-30b-a3b-64": f"{PUBLISHED_QWEN3} --world 64 --parallel.pp 4",
    "published-qwen3-30b-a3b-64-replicas": (
        f"{PUBLISHED_QWEN3} --world 64 --parallel.pp 4 --parallel.replicas 2"
    ),
    "published-deepseek-v2-lite-8-adamw": f"{PUBLISHED_LITE} --optim.name adamw",
    "published-deepseek-v2-lite-8-muon": PUBLISHED_LITE,
}
"""Runs of which another trainer has published the peak."""

PLANS = {
    **PUBLISHED,
    "quickstart-1-muon": "configs/quickstart.toml --device cpu",
    "quickstart-deep-attention": f"{DEEP_QUICKSTART} attention",
    "quickstart-deep-attention-early": f"{DEEP_QUICKSTART} attention {EARLY}",
    "quickstart-deep-all": f"{DEEP_QUICKSTART} {ALL}",
    "quickstart-deep-all-early": f"{DEEP_QUICKSTART} {ALL} {EARLY}",
    "deepseek-v2-lite-8-ep8-muon": DEEPSEEK_LITE,
    "deepseek-v2-lite-8-ep8-soap_muon": f"{DEEPSEEK_LITE} --optim.name soap_muon",
    "gpt-oss-20b-8-pp2-ep4-muon": GPT_OSS,
    "gpt-oss-20b-8-pp2-ep4-soap_muon": f"{GPT_OSS} --optim.name soap_muon",
    "qwen3-30b-a3b-16-pp2-ep8-muon": QWEN3,
    "qwen3-30b-a3b-16-pp2-ep8-soap_muon": f"{QWEN3} --optim.name soap_muon",
    "qwen3-30b-a3b-16-pp2-ep8-soap_muon-by-memory": (
        f"{QWEN3} --optim.name soap_muon --parallel.partition memory"
    ),
    "qwen3-30b-a3b-16-pp2-ep8-soap": f"{QWEN3} --optim.name soap",
    "qwen3-30b-a3b-16-pp2-ep8-soap-bf16": f"{QWEN3} --optim.name soap {BF16}",
    "qwen3-30b-a3b-16-pp2-ep8-soap-smaller": f"{QWEN3} --optim.name soap {SMALLER}",
    "qwen3-30b-a3b-16-pp2-ep8-soap-smaller-bf16": f"{QWEN3} --optim.name soap {SMALLER} {BF16}",
    "qwen3-30b-a3b-16-pp2-ep8-soap-attention": f"{QWEN3} --optim.name soap {ATTENTION}",
    "qwen3-30b-a3b-16-pp2-ep8-soap-experts": (
        f"{QWEN3} --optim.name soap {ATTENTION} --moe.memory recompute"
    ),
    "qwen3-30b-a3b-16-pp4-ep4-soap_muon": f"{QWEN3_WIDE} --optim.name soap_muon",
    "qwen3-30b-a3b-16-pp4-ep4-soap_muon-by-memory": (
        f"{QWEN3_WIDE} --optim.name soap_muon --parallel.partition memory"
    ),
    "qwen3-30b-a3b-8-pp2-ep4-soap_muon": (
        f"{QWEN3_SMALL} --parallel.pp 2 --parallel.ep 4 --optim.name soap_muon"
    ),
    "qwen3-30b-a3b-16-muon": "configs/qwen3-30b-a3b.toml --world 16",
    "qwen3-30b-a3b-8-muon": QWEN3_SMALL,
    "qwen3-30b-a3b-8-muon-int8": f"{QWEN3_SMALL} {INT8}",
    "qwen3-30b-a3b-8-soap_muon-int8": f"{QWEN3_SMALL} --optim.name soap_muon {INT8}",
    "qwen3-30b-a3b-8-ep8-muon-bf16": f"{QWEN3_NODE} {BF16} {GRADIENTS}",
    "qwen3-30b-a3b-8-ep8-muon-int8": f"{QWEN3_NODE} {INT8}",
    "qwen3-30b-a3b-8-ep8-soap_muon-bf16": (
        f"{QWEN3_NODE} --optim.name soap_muon {BF16} {GRADIENTS} {ROUNDED}"
    ),
    "qwen3-30b-a3b-8-ep8-soap_muon-int8": f"{QWEN3_NODE} --optim.name soap_muon {INT8}",
    "qwen3-30b-a3b-8-ep8-soap-int8": (
        f"{QWEN3_NODE} --optim.name soap {INT8} {GRADIENTS} {ROUNDED}"
    ),
    "qwen3-30b-a3b-8-ep8-soap": f"{QWEN3_NODE} --optim.name soap",
    "qwen3-30b-a3b-8-ep8-soap-smaller": f"{QWEN3_NODE} --optim.name soap {SMALLER}",
    "qwen3-0.6b-1-muon": "configs/qwen3-0.6b.toml --world 1",
    "llama-3.2-1b-1-muon": "configs/llama-3.2-1b.toml --world 1",
    "long-qwen3-30b-a3b-16-cp8-ep2": f"{LONG_QWEN3} --train.sequence-length 131072",
    "long-deepseek-v2-lite-8-cp8": f"{LONG_LITE} --train.sequence-length 65536",
    "olmoe-1b-7b-8-ep8-muon": "configs/olmoe-1b-7b.toml --world 8 --parallel.ep 8",
    "mixtral-8x7b-16-pp2-ep8-muon": (
        "configs/mixtral-8x7b.toml --world 16 --parallel.pp 2 --parallel.ep 8"
    ),
    "moonlight-16b-a3b-8-ep8-muon": "configs/moonlight-16b-a3b.toml --world 8 --parallel.ep 8",
    "glm-4.5-air-64-pp2-ep16-muon": (
        "configs/glm-4.5-air.toml --world 64 --parallel.pp 2 --parallel.ep 16"
    ),
    "qwen3.5-35b-a3b-16-pp2-ep8-muon": (
        "configs/qwen3.5-35b-a3b.toml --world 16 --parallel.pp 2 --parallel.ep 8"
    ),
    "qwen3-next-80b-a3b-32-pp2-ep16-muon": (
        "configs/qwen3-next-80b-a3b.toml --world 32 --parallel.pp 2 --parallel.ep 16"
    ),
    "deepseek-v3-512-pp8-ep64-muon": (
        "configs/deepseek-v3.toml --world 512 --parallel.pp 8 --parallel.ep 64"
    ),
    "kimi-k2-512-pp8-ep64-muon": (
        "configs/kimi-k2.toml --world 512 --parallel.pp 8 --parallel.ep 64"
    ),
    "lora-qwen3-30b-a3b-1": LORA,
    "lora-qwen3-30b-a3b-1-offload": f"{LORA} --train.offload-frozen",
    "deepseek-v2-lite-1-muon-offload": (
        f"configs/deepseek-v2-lite.toml --world 1 {WEIGHTS} {GRADIENTS} "
        "--optim.weight-rounding stochastic --optim.offload"
    ),
    "deepseek-v2-lite-2-ep2-muon-bf16": (
        f"configs/deepseek-v2-lite.toml --world 2 --parallel.ep 2 {BF16} {WEIGHTS} {GRADIENTS}"
    ),
    "kimi-k2-6-layers-512-ep8-muon": (
        "configs/kimi-k2.toml --world 512 --parallel.pp 1 --parallel.ep 8 "
        "--model.num-hidden-layers 6"
    ),
    "deepseek-v2-512-pp8-ep8-soap_muon": (
        "configs/deepseek-v2.toml --world 512 --parallel.pp 8 "
        "--parallel.ep 8 --optim.name soap_muon"
    ),
}
"""Arguments of `lather plan` by the name of the file."""


def main(names: list[str]) -> int:
    if unknown := sorted(set(names) - set(PLANS)):
        print(
            f"no plan is called {', '.join(unknown)}: there are {', '.join(PLANS)}", file=sys.stderr
        )
        return 2
    # the files are replaced last: a checkout with changes has no commit to name
    with tempfile.TemporaryDirectory() as folder:
        for name in names or PLANS:
            arguments, out = PLANS[name].split(), Path(folder) / f"{name}.json"
            subprocess.run(
                [sys.executable, "-m", "lather", "plan", *arguments, "--json", str(out)],
                check=True,
                cwd=ROOT,
            )
            document = json.loads(out.read_text("utf-8"))
            out.write_text(
                json.dumps({**document, "arguments": arguments}, indent=1) + "\n", "utf-8"
            )
        for out in Path(folder).iterdir():
            shutil.copyfile(out, FOLDER / out.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
