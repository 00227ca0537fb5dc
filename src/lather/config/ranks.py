"""Which numbers of ranks can run a configuration."""

from __future__ import annotations

from lather.config.config import Config
from lather.errors import require


def check_parallel(config: Config, world_size: int, option: str = "--nproc") -> None:
    """Raise ConfigError unless `world_size` ranks, which `option` gives, can run `config`."""
    config.num_micro_batches(config.parallel.data_ranks(world_size, option))
    if config.train.cuda_graph:
        _check_graph(config, world_size)


def _check_graph(config: Config, world_size: int) -> None:
    """Raise ConfigError unless the passes of all steps launch the same kernels, and the host waits
    for nothing in them."""
    obstacles = {
        f"{world_size} ranks": world_size > 1,
        "data.packed_attention": config.data.packed_attention,
        "data.packing 'documents'": config.data.packing == "documents",
        "train.first_batch_size": config.train.first_batch_size,
        "train.offload_frozen": config.train.offload_frozen,
        "train.qk_clip": config.train.qk_clip,
        "log.attention_logits_every": config.log.attention_logits_every,
        "log.timeline_every": config.log.timeline_every,
        "multi-token prediction": config.model.num_nextn_predict_layers,
    }
    present = [name for name, is_present in obstacles.items() if is_present]
    constraint = f"false with {' and '.join(present)}: a graph repeats the same passes"
    require(not present, "train.cuda_graph", True, constraint)
