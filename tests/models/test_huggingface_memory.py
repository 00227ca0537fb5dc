"""Memory while weights are read and written: bytes counted at every operation, and the process's
own peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.live_bytes import PeakBytes
from lather.models.decoder import Decoder
from lather.models.families import ModelConfig, build_model
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import load_hugging_face, open_hugging_face
from lather.safetensors_file import SafetensorsFiles, copy_weights, open_safetensors
from models.tiny import tiny_config, tiny_family_config, tiny_model
from scripts import printed_by

SHARD = 300_000
"""Bytes of a shard."""


def make(family: str) -> tuple[ModelConfig, Decoder]:
    """Make a model in bf16. DeepSeek-V2's largest tensor is the embedding; GPT-OSS's are the
    stacked experts, of which one at a time is in memory."""
    config: ModelConfig
    if family == "deepseek_v2":
        sizes = {"vocab_size": 2000, "hidden_size": 64, "moe_intermediate_size": 80}
        config = tiny_config(**sizes, n_routed_experts=16, num_hidden_layers=4)
    else:
        sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 80, "head_dim": 8}
        config = tiny_family_config("gpt_oss", **sizes, num_local_experts=16, num_hidden_layers=4)
    return config, build_model(config, torch.Generator()).bfloat16()


@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss"])
@pytest.mark.parametrize("transfer", ["import", "load", "export from a file", "export a model"])
def test_one_tensor_at_a_time(
    family: str, transfer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor is there twice while its dtype changes, and three times while it is also
    transposed."""
    config, model = make(family)
    save_hugging_face(model, config, tmp_path / "in", max_shard_bytes=SHARD)
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 4
    weights, _ = open_hugging_face(tmp_path / "in")
    copy_weights(weights, tmp_path / "ours.safetensors")
    stored = open_safetensors(tmp_path / "ours.safetensors")
    read = SafetensorsFiles.read

    def counted_read(*arguments: Any) -> torch.Tensor:
        """Count the copy: no operation makes the memory that a file is read into, so it would not
        be seen."""
        tensor = read(*arguments)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor.clone()

    monkeypatch.setattr(SafetensorsFiles, "read", counted_read)
    with PeakBytes(count_meta=False) as peak:
        if transfer == "import":
            copy_weights(weights, tmp_path / "again.safetensors")
        elif transfer == "load":
            load_hugging_face(tmp_path / "in", model)
        else:
            from_file = transfer == "export from a file"
            source, dtype = (stored, torch.bfloat16) if from_file else (model, torch.float32)
            save_hugging_face(source, config, tmp_path / "out", max_shard_bytes=SHARD, dtype=dtype)
    largest = max(p[0].numel() if p.dim() == 3 else p.numel() for p in model.parameters())
    assert 0 < peak.bytes <= largest * (2 + 4 + 4)
    assert peak.bytes < sum(p.numel() for p in model.parameters())


PEAK_OF_A_ROUND_TRIP = """
import re, sys
from pathlib import Path
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import open_hugging_face
from lather.safetensors_file import copy_weights, open_safetensors

def memory(line):
    return int(re.search(line + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

folder = Path(sys.argv[1])
open_hugging_face(folder / "in")
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
weights, config = open_hugging_face(folder / "in")
copy_weights(weights, folder / "ours.safetensors")
tensors = open_safetensors(folder / "ours.safetensors")
save_hugging_face(tensors, config, folder / "out", max_shard_bytes=8_000_000)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's record of the peak"
)
def test_the_process_grows_by_a_shard_and_a_tensor_not_by_the_model(tmp_path: Path) -> None:
    """The model has 112 MB in fp32, its shards 8 MB, its largest tensor 4 MB."""
    sizes = {"vocab_size": 4000, "hidden_size": 256, "moe_intermediate_size": 256}
    sizes |= {"n_routed_experts": 64, "num_hidden_layers": 3}
    save_hugging_face(
        tiny_model(**sizes), tiny_config(**sizes), tmp_path / "in", max_shard_bytes=8_000_000
    )
    peak = printed_by(PEAK_OF_A_ROUND_TRIP, tmp_path, variables={"OMP_NUM_THREADS": "1"})
    assert (tmp_path / "ours.safetensors").stat().st_size > 110_000_000
    assert int(peak) < 8_000_000 + 2 * 4_000_000
