"""Gated DeltaNet against transformers' layers, in packed documents and in pieces, the bytes that it
keeps, and what fresh weights and the optimizer make of its parameters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.live_bytes import PeakBytes
from lather.config.optim import optim_config
from lather.engine.optimizer import build_optimizer
from lather.models.delta_net import DeltaSizes, GatedDeltaNet, convolution
from lather.models.key_value_cache import KeyValueCache
from lather.models.saving.recomputed import Recomputation
from lather.models.token_positions import SequenceLayout
from models.tiny import error, layout_of, random_normal

SIZES = DeltaSizes(
    hidden_size=12,
    num_key_heads=2,
    num_value_heads=6,
    key_head_dim=5,
    value_head_dim=3,
    kernel_size=4,
)
BOTH = pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "separate"])


def layer_of(sizes: DeltaSizes = SIZES, *, grouped: bool) -> GatedDeltaNet:
    layer = GatedDeltaNet(sizes, 1e-3, grouped_projections=grouped).double()
    generator = torch.Generator().manual_seed(1)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5, generator=generator)
    return layer


def results_of(layer: nn.Module, y_BSD: Tensor, x_BSD: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and of every parameter."""
    leaves = [x_BSD, *dict(sorted(layer.named_parameters())).values()]
    weights = random_normal(*y_BSD.shape, seed=5).to(y_BSD)
    return [y_BSD.detach(), *torch.autograd.grad((y_BSD * weights).sum(), leaves)]


@BOTH
@pytest.mark.parametrize("changes", [{}, {"num_key_heads": 6}, {"kernel_size": 1}], ids=str)
def test_outputs_and_gradients_are_those_of_transformers(
    grouped: bool, changes: dict[str, int]
) -> None:
    name = "qwen3_next" if grouped else "qwen3_5_moe"
    theirs = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    configs = pytest.importorskip(f"transformers.models.{name}.configuration_{name}")
    sizes = DeltaSizes(**{**vars(SIZES), **changes})
    layer = layer_of(sizes, grouped=grouped).float()
    fields = {
        "linear_num_key_heads": sizes.num_key_heads,
        "linear_num_value_heads": sizes.num_value_heads,
        "linear_key_head_dim": sizes.key_head_dim,
        "linear_value_head_dim": sizes.value_head_dim,
        "linear_conv_kernel_dim": sizes.kernel_size,
    }
    prefix = "Qwen3Next" if grouped else "Qwen3_5Moe"
    config_class = getattr(configs, f"{prefix}{'' if grouped else 'Text'}Config")
    config = config_class(hidden_size=12, rms_norm_eps=1e-3, num_hidden_layers=1, **fields)
    twin = getattr(theirs, f"{prefix}GatedDeltaNet")(config, 0)
    twin.load_state_dict(layer.state_dict())
    x_BSD = random_normal(2, 70, 12).float().requires_grad_()
    ours = results_of(layer, layer(x_BSD, layout_of(x_BSD)), x_BSD)
    expected = results_of(twin, twin(x_BSD), x_BSD)
    for x, y in zip(ours, expected, strict=True):
        assert error(x, y) < 1e-5


def test_the_convolution_is_torch_s() -> None:
    x_BSC, filter_CW = random_normal(2, 9, 5), random_normal(5, 4, seed=1)
    padded = F.pad(x_BSC, (0, 0, 3, 0)).mT
    expected = F.silu(F.conv1d(padded, filter_CW.unsqueeze(1), groups=5)).mT
    assert error(convolution(x_BSC, filter_CW), expected) < 1e-14
    later = convolution(x_BSC[:, 4:], filter_CW, None, x_BSC[:, 1:4])
    assert error(later, expected[:, 4:]) < 1e-14


@BOTH
def test_packed_documents_are_separate_ones(grouped: bool) -> None:
    """Documents of odd lengths, shorter than the convolution and longer than a chunk, in two
    rows."""
    layer, bounds = layer_of(grouped=grouped), [0, 3, 4, 6, 71, 80, 100, 160]
    x_BSD = random_normal(2, 80, 12).requires_grad_()
    layout = SequenceLayout(2, 80, torch.device("cpu"), torch.tensor(bounds))
    assert layout.cu_seqlens is not None
    assert layout.cu_seqlens.tolist() == bounds
    packed = layer(x_BSD, layout)
    separate = torch.cat(
        [
            layer(piece[None], layout_of(piece[None]))
            for piece in x_BSD.flatten(0, 1).split([b - a for a, b in itertools.pairwise(bounds)])
        ],
        dim=1,
    )
    for x, y in zip(
        results_of(layer, packed, x_BSD),
        results_of(layer, separate.view_as(packed), x_BSD),
        strict=True,
    ):
        assert error(x, y) < 1e-12


@BOTH
def test_recomputed_tensors_have_the_same_bits_and_are_not_kept(grouped: bool) -> None:
    """Kept are the outputs of the projections and of the rule, and no other tensor."""
    layer, x_BSD = layer_of(grouped=grouped), random_normal(2, 70, 12).requires_grad_()
    results, layout, kept = [], layout_of(x_BSD), []
    for enabled in (True, False):
        recomputation = Recomputation(enabled=enabled)
        with PeakBytes() as alive:
            with recomputation.watch():
                y_BSD = layer(x_BSD, layout, recomputation)
            kept.append((alive.now - y_BSD.nbytes) // (2 * 70 * 8))
        results.append(results_of(layer, y_BSD, x_BSD))
        del y_BSD
    channels, values, heads = 2 * 10 + 18, 18, 6
    assert kept[0] == channels + values + 2 * heads + values
    assert kept[1] == kept[0] + channels + 2 * heads + values
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@BOTH
def test_in_bf16_it_is_as_far_off_as_bf16_is(grouped: bool) -> None:
    layer, x_BSD = layer_of(grouped=grouped), random_normal(2, 70, 12).requires_grad_()
    expected = results_of(layer, layer(x_BSD, layout_of(x_BSD)), x_BSD)
    narrow, x_BSD = layer.float(), x_BSD.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y_BSD = narrow(x_BSD, layout_of(x_BSD))
    for x, y in zip(results_of(narrow, y_BSD, x_BSD), expected, strict=True):
        assert error(x.double(), y) < 0.06


@BOTH
@torch.no_grad()
def test_tokens_read_in_pieces_have_the_outputs_of_one_pass(grouped: bool) -> None:
    """The second row begins after four places of padding, whose contents do not matter."""
    layer, x_BSD = layer_of(grouped=grouped), random_normal(2, 75, 12)
    cache, outputs = KeyValueCache(torch.tensor([0, 4])), []
    for piece_BSD in x_BSD.split([2, 1, 1, 70, 1], dim=1):
        layout = SequenceLayout(2, piece_BSD.shape[1], piece_BSD.device, cache=cache)
        outputs.append(layer(piece_BSD, layout))
    y_BSD = torch.cat(outputs, dim=1)
    for row, padding in ((0, 0), (1, 4)):
        alone_BSD = x_BSD[row, padding:].unsqueeze(0)
        expected = layer(alone_BSD, layout_of(alone_BSD))[0]
        assert error(y_BSD[row, padding:], expected) < 1e-12


def test_fresh_parameters_are_those_of_the_published_models() -> None:
    layer = GatedDeltaNet(
        DeltaSizes(**{**vars(SIZES), "num_value_heads": 2000}), 1e-6, grouped_projections=True
    )
    generator = torch.Generator().manual_seed(0)
    a_log, dt_bias = (
        layer.fresh_parameter(name, layer.get_parameter(name), generator)
        for name in ("A_log", "dt_bias")
    )
    assert dt_bias.eq(1).all()
    spread = a_log.exp().sort().values
    assert error(spread, torch.linspace(0.01, 16, 2000)) < 0.05


@BOTH
def test_matrix_rules_get_the_projections_alone(
    grouped: bool, recwarn: pytest.WarningsRecorder
) -> None:
    layer = layer_of(grouped=grouped)
    named = [(f"layers.0.self_attn.{name}", p) for name, p in layer.named_parameters()]
    optimizer = build_optimizer(optim_config("muon"), named)
    rules: dict[str, Any] = {
        name.rpartition("self_attn.")[2]: group["rule"]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    matrices = {name for name, rule in rules.items() if rule == "muon"}
    assert matrices == {name for name in rules if name.endswith("proj.weight") or "in_proj" in name}
    assert len(recwarn) == 0
