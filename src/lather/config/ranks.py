"""Which numbers of ranks can run a configuration."""

from __future__ import annotations

from lather.config.config import Config
from lather.errors import require


def check_parallel(config: Config, world_size: int, option: str = "--nproc") -> None:
    """Raise ConfigError unless `world_size` ranks, which `option` gives, can run `config`."""
    config.num_micro_batches(config.parallel.data_ranks(world_size, option))
    if config.train.cuda_graph:
        _check_graph(config, f"{option} {world_size}" if world_size > 1 else "")


def _check_graph(config: Config, several_ranks: str) -> None:
    """Raise ConfigError unless the passes of all steps launch the same kernels, and the host waits
    for nothing in them. `several_ranks`: the option that gives several ranks, if it does."""
    train, log = config.train, config.log
    waits_for_sizes = config.model.num_routed_experts > 0 and train.precision != "bf16"
    obstacles = {
        several_ranks: several_ranks,
        f"train.precision {train.precision!r}, whose experts wait for sizes": waits_for_sizes,
        "moe.memory 'reference'": config.moe.memory == "reference",
        "model.num_nextn_predict_layers": config.model.num_nextn_predict_layers,
        "data.packed_attention": config.data.packed_attention,
        "data.packing 'documents'": config.data.packing == "documents",
        "train.first_batch_size": train.first_batch_size,
        "train.gradient_dtype 'bfloat16'": train.gradient_dtype == "bfloat16",
        "train.offload_frozen": train.offload_frozen,
        "train.qk_clip": train.qk_clip,
        "log.attention_logits_every": log.attention_logits_every,
        "log.timeline_every": log.timeline_every,
    }
    present = [name for name, is_present in obstacles.items() if is_present]
    constraint = f"false with {' and '.join(present)}: change that, or leave the graph out"
    require(not present, "train.cuda_graph", True, constraint)
