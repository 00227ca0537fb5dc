"""The time model of `lather bench launches`: the longest of three times for each launch, a kind for
every kernel, a source for every rate, and predictions beside measured rows."""

import ast
import importlib
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import predicted as of_gpu
from benchmarks.gpu.predicted import optimizer_ms, predicted
from benchmarks.launches import markdown
from lather.time_model import kinds
from lather.time_model.rates import H100, H200, TABLES, UNKNOWN
from lather.time_model.triton_traffic import kernel_traffic
from scripts import printed_by

REPOSITORY = Path(__file__).parents[2]
MEASURED = [
    json.loads(line)
    for line in (REPOSITORY / "benchmarks/results/gpu/nvidia-h100-80gb-hbm3/rows.jsonl")
    .read_text()
    .splitlines()
]
TWO_LAUNCHES = """
import json
from benchmarks.launches.counter import Counter
from lather.time_model.launches import KernelLaunch

with Counter() as counter:
    counter.launch("few flops", 2 * 10**9, 10**9, flops=10**9, kind="GEMM")
    counter.launch("few bytes", 10**6, 10**6, flops=10**12, kind="GEMM")
    counter.add(KernelLaunch("tiny", "elementwise", 4, 4, times=3))
    counter.launch("of another project", 4, 4)
    counter.launch("flex attention", 4, 4, flops=10**12)
    total = counter.total
print(json.dumps([total.seconds, total.unknown]))
"""


def test_a_launch_takes_the_longest_of_three_times() -> None:
    gemm = H100.kinds["GEMM"]
    assert H100.seconds("GEMM", 10**9, 10**9, 1) == pytest.approx(10**9 / gemm.bytes)
    assert H100.seconds("GEMM", 10**6, 10**12, 1) == pytest.approx(10**12 / gemm.flops)
    assert H100.seconds("GEMM", 1, 1, 3) == pytest.approx(3 * H100.shortest)


def test_times_are_added_launch_by_launch() -> None:
    """The sum of the longest times, not the longest of the sums: a launch that waits for memory
    hides no arithmetic of another. Of flex attention half is computed."""
    seconds, unknown = json.loads(printed_by(TWO_LAUNCHES))
    gemm, flex = H100.kinds["GEMM"], H100.kinds["flex attention"]
    assert seconds["GEMM"] == pytest.approx(3e9 / gemm.bytes + 1e12 / gemm.flops)
    assert seconds["elementwise"] == pytest.approx(3 * H100.shortest)
    assert seconds["flex attention"] == pytest.approx(0.5e12 / flex.flops)
    assert unknown == {"of another project": 1}
    assert seconds[UNKNOWN] == pytest.approx(H100.shortest)


# --- rates ----------------------------------------------------------------------------------------


def test_every_rate_has_a_source_and_every_kind_a_rate() -> None:
    for table, (kind, rate) in itertools.product(TABLES, H100.kinds.items()):
        assert rate.source.startswith(("measured: ", "assumed: ")), kind
        assert 0 < table.kinds[kind].bytes <= table.kinds["copies"].bytes, kind
        assert rate.flops == table.kinds[kind].flops > 0, kind
    assert H100.source.startswith(("measured: ", "assumed: "))
    assert {*kinds.KINDS, *kinds.TRITON.values()} <= H100.kinds.keys()
    assert H100.kinds["GEMM"].flops < H100.peak_flops


@pytest.mark.parametrize(
    ("kind", "rate", "of_row"),
    [
        ("loss kernels", "bytes", ("kernel", "cross_entropy_", "bytes_per_second")),
        ("optimizer kernels", "bytes", ("kernel", "adam_in_basis", "bytes_per_second")),
        ("fp32 GEMM", "flops", ("refresh", "", "product_flops_per_second")),
    ],
)
def test_measured_rates_are_those_of_the_rows(
    kind: str, rate: str, of_row: tuple[str, str, str]
) -> None:
    benchmark, name, key = of_row
    measured = [
        row[key]
        for row in MEASURED
        if row["benchmark"] == benchmark and row["config"].get("kernel", "").startswith(name)
    ]
    assert H100.kinds[kind].source.startswith("measured: ")
    assert any(
        getattr(H100.kinds[kind], rate) == pytest.approx(value, rel=0.01) for value in measured
    )
    copy = MEASURED[0]["rates"]["bytes"]
    assert H200.kinds["copies"].bytes > H100.kinds["copies"].bytes
    assert H100.kinds["copies"].bytes == pytest.approx(copy, rel=0.01)


# --- kinds ----------------------------------------------------------------------------------------


def test_no_kernel_is_of_two_kinds() -> None:
    names = Counter(name for listed in kinds.KINDS.values() for name in listed)
    assert not [name for name, times in names.items() if times > 1]


def test_every_folder_of_triton_kernels_has_a_kind() -> None:
    folders = [path.parent.name for path in REPOSITORY.glob("src/lather/kernels/*/triton.py")]
    assert len(folders) > 10
    assert not [name for name in folders if name not in kinds.TRITON]


def test_every_product_in_a_triton_kernel_has_its_flops() -> None:
    """A Triton kernel with `tl.dot` needs a function that counts its flops."""
    for path in REPOSITORY.glob("src/lather/kernels/*/triton.py"):
        source = path.read_text()
        for part in ast.parse(source).body:
            if isinstance(part, ast.FunctionDef) and "tl.dot(" in ast.unparse(part):
                assert f"{path.parent.name}.{part.name}" in kinds.TRITON_FLOPS


def test_a_triton_kernel_with_products_that_nobody_counts_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function: Any = SimpleNamespace(__module__="lather.kernels.gather.triton", __name__="_kernel")
    monkeypatch.setattr(kinds, "source_of", lambda given: "x = tl.dot(a, b)")
    assert kinds.kind_of_triton(function, {}) == UNKNOWN
    monkeypatch.setitem(kinds.TRITON_FLOPS, "gather._kernel", lambda tensors: 7)
    monkeypatch.setitem(kinds.TRITON, "gather._kernel", "grouped GEMM")
    assert kinds.kind_of_triton(function, {}) == "grouped GEMM"
    assert kinds.flops_of_triton(function, {}) == 7
    monkeypatch.setattr(kinds, "source_of", lambda given: "x = a + b")
    function.__name__ = "_other"
    assert kinds.kind_of_triton(function, {}) == "rows moved"
    assert kinds.flops_of_triton(function, {}) == 0


def test_what_a_function_stores_in_several_places_is_written() -> None:
    triton = pytest.importorskip("lather.kernels.swiglu.triton")
    sizes = {"gate_up_ptr": 7, "values_ptr": 5, "scales_ptr": 3}
    tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    assert kernel_traffic(triton._forward_kernel.fn, tensors) == (7, 5 + 3)


def kernel_of(folder: str, name: str) -> Callable[..., Any]:
    pytest.importorskip("triton")
    function: Callable[..., Any] = getattr(
        importlib.import_module(f"lather.kernels.{folder}.triton"), name
    ).fn
    return function


def test_products_in_fp8_with_transposed_weights_are_a_kind_of_their_own() -> None:
    """The rate is assumed, that of other products in FP8 measured."""
    function = kernel_of("block_scaled", "_multiply")
    kind, turned = (kinds.kind_of_triton(function, {"TRANSPOSED": x}) for x in (False, True))
    assert (kind, turned) == ("FP8 grouped GEMM", "FP8 grouped GEMM, transposed")
    assert H100.kinds[kind].source.startswith("measured: ")
    assert H100.kinds[turned].source.startswith("assumed: ")


def test_a_tensor_under_two_names_is_read_and_written_once() -> None:
    """The tile of logits is overwritten by its gradient; SOAP-Muon's Adam changes the averages that
    are its gradient."""
    function = kernel_of("linear_cross_entropy", "_softmax_gradient")
    logits, row = torch.empty(4, 8), torch.empty(4)
    others = {"labels": row, "logsumexp": row.clone(), "scale": row.clone()}
    in_place = {"out": logits, "logits": logits, **others}
    assert kernel_traffic(function, in_place) == (logits.nbytes + 3 * row.nbytes, logits.nbytes)
    assert kernel_traffic(function, {**in_place, "out": logits.half()}) == (
        logits.nbytes + 3 * row.nbytes,
        logits.nbytes // 2,
    )
    adam = kernel_of("adam_in_basis", "_adam")
    average, square, u = (torch.empty(8) for _ in range(3))
    tensors = {"g": average, "exp_avg": average, "exp_avg_sq": square, "u": u, "eps": 1e-8}
    assert kernel_traffic(adam, {**tensors, "PER_MATRIX": False}) == (2 * u.nbytes, 3 * u.nbytes)


def test_a_pointer_is_followed_and_only_branches_that_are_compiled_count() -> None:
    """The logits are stored through the start of their row, with a gradient alone; a pointer that
    only has to be valid is neither read nor written."""
    function = kernel_of("cross_entropy", "_cross_entropy")
    logits, losses, scale = torch.empty(4, 8), torch.empty(4), torch.empty(1)
    labels = torch.empty(4, dtype=torch.int64)
    tensors = {"logits": logits, "labels": labels, "losses": losses}
    read = logits.nbytes + labels.nbytes
    assert kernel_traffic(function, {**tensors, "scale": scale, "WITH_GRADIENT": True}) == (
        read + scale.nbytes,
        losses.nbytes + logits.nbytes,
    )
    without = {**tensors, "scale": losses, "WITH_GRADIENT": False}
    assert kernel_traffic(function, without) == (read, losses.nbytes)

    gate = kernel_of("swiglu", "_backward_kernel")
    x, grad, result = torch.empty(4, 16), torch.empty(4, 8), torch.empty(4, 16)
    unused = dict.fromkeys(("scale_ptr", "h_ptr", "dot_ptr"), x)
    given = {"grad_h_ptr": grad, "gate_up_ptr": x, "grad_gate_up_ptr": result, **unused}
    constants = {"SCALED": False, "STORE_H": False, "values_ptr": None, "scales_ptr": None}
    assert kernel_traffic(gate, given | constants) == (x.nbytes + grad.nbytes, result.nbytes)
    assert kernel_traffic(gate, given | constants | {"h_ptr": grad.clone(), "STORE_H": True}) == (
        x.nbytes + grad.nbytes,
        result.nbytes + grad.nbytes,
    )


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("mm", torch.bfloat16, "GEMM"),
        ("bmm", torch.float32, "fp32 GEMM"),
        ("_grouped_mm", torch.bfloat16, "grouped GEMM"),
        ("_scaled_dot_product_cudnn_attention", torch.bfloat16, "attention forward"),
        ("_scaled_dot_product_flash_attention_backward", torch.bfloat16, "attention backward"),
        ("_scaled_dot_product_efficient_attention", torch.float32, UNKNOWN),
        ("_foreach_lerp_", torch.float32, "elementwise"),
        ("_foreach_norm", torch.float32, "reductions"),
        ("nobody_knows_this", torch.float32, UNKNOWN),
    ],
)
def test_kinds(name: str, dtype: torch.dtype, kind: str) -> None:
    x = torch.empty(2, 2, dtype=dtype, device="meta")
    assert kinds.kind_of(name, [x, x], [x]) == kind


def test_kinds_by_dtype() -> None:
    """The product's operands count, not the sum; casts change the dtype; a scalar of the host is no
    transfer."""
    wide, narrow = (torch.empty(2, 2, dtype=x, device="meta") for x in (torch.float32, torch.half))
    assert kinds.kind_of("addmm", [wide, narrow, narrow], [wide]) == "GEMM"
    assert kinds.kind_of("addmm", [wide, wide, wide], [wide]) == "fp32 GEMM"
    assert kinds.kind_of("_to_copy", [wide], [narrow]) == "casts"
    assert kinds.kind_of("copy_", [wide, wide], []) == "copies"
    assert kinds.kind_of("copy_", [wide, torch.empty(2, 2)], []) == "transfers with the host"
    assert kinds.kind_of("copy_", [wide, torch.empty(())], []) == "copies"


@pytest.mark.parametrize("causal", [False, True])
def test_causal_attention_is_half_of_its_flops(causal: bool) -> None:
    aten = torch.ops.aten
    q = torch.empty(1, 1, 2, 2, device="meta")
    forward: Any = aten._scaled_dot_product_flash_attention.default
    name = "_scaled_dot_product_flash_attention"
    assert kinds.is_causal(forward, name, (q, q, q, 0.0, causal), {}) is causal
    backward: Any = aten._scaled_dot_product_flash_attention_backward.default
    arguments = (q, q, q, q, q, q, None, None, 2, 2, 0.0, causal)
    assert kinds.is_causal(backward, f"{name}_backward", arguments, {}) is causal
    assert not kinds.is_causal(aten.mm.default, "mm", (q, q), {"is_causal": True})


# --- predictions ----------------------------------------------------------------------------------


def step_row(name: str, ms: float, of_optimizer: float, **sizes: Any) -> dict[str, Any]:
    config = {"part": "gpu step", "model": "m", "optimizer": "soap", "frequency": 4, "row": name}
    return {
        "config": {**config, **sizes},
        "of_devices_ms": {"A GPU": ms, "A third": 1.0},
        "phases": {
            "lather.optim.update": {"of_devices_ms": {"A GPU": of_optimizer, "A third": 1.0}},
            "rest": {},
        },
    }


ROWS = [
    step_row("first bases", 999.0, 900.0, hidden_size=8, batch_size=2),
    step_row("between refreshes", 100.0, 20.0, hidden_size=8, batch_size=2),
    step_row("refresh", 180.0, 100.0, hidden_size=8, batch_size=2),
]
STEP: dict[str, Any] = {
    "benchmark": "training",
    "hardware": {"gpu": "A GPU"},
    "config": {"optimizer": "soap", "batch_size": 2, "model": {"hidden_size": 8}},
    "step_seconds": 0.1,
    "optimizer_seconds": 0.05,
    "tokens_per_second": 1.0,
    "mfu": 0.5,
    "peak_bytes": None,
}


def test_a_measured_step_is_compared_with_the_mean_between_two_refreshes() -> None:
    assert predicted(STEP, ROWS) == pytest.approx((3 * 100 + 180) / 4)
    assert predicted(STEP, ROWS, optimizer_ms) == pytest.approx((3 * 20 + 100) / 4)


@pytest.mark.parametrize(
    "change",
    [
        {"hardware": {"gpu": "Another GPU"}},
        {"benchmark": "block"},
        {"config": {**STEP["config"], "optimizer": "muon"}},
        {"config": {**STEP["config"], "batch_size": 4}},
        {"config": {**STEP["config"], "model": {"hidden_size": 9}}},
    ],
)
def test_nothing_is_predicted_for_other_devices_and_sizes(change: dict[str, Any]) -> None:
    assert predicted({**STEP, **change}, ROWS) is None


def test_make_gpu_prints_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.summary import DESCRIBE

    describe: Callable[[Any], str] = DESCRIBE["training"]
    monkeypatch.setattr(of_gpu, "predictions", lambda: ROWS)
    assert describe([STEP]).endswith("100 ms a step (predicted 120.0)")
    assert describe([STEP | {"hardware": {"gpu": None}}]).endswith("100 ms a step")


def test_tables_name_what_is_compared() -> None:
    table = markdown.measured_table(ROWS, [STEP, STEP | {"benchmark": "kernel"}])
    assert table.splitlines()[2:] == [
        "| GPU | a step of the 1.7 B model, soap | 120.0 | 100.0 | 1.20 |",
        "| GPU | of it the optimizer | 40.0 | 50.0 | 0.80 |",
    ]
    assert len(markdown.rates_table().splitlines()) == 2 + len(H100.kinds)


def test_all_kernels_of_the_published_rows_are_known() -> None:
    of_the_model = [row for row in of_gpu.predictions() if "of_devices_ms" in row]
    assert {row["config"]["part"] for row in of_the_model} >= {"block", "gpu step", "refresh"}
    for row in of_the_model:
        assert row["of_devices_ms"].keys() == {table.name for table in TABLES}
        assert row["of_devices_ms"][H100.name] == pytest.approx(row["predicted_ms"], rel=1e-3)
        assert row["total"]["unknown"] == {}, row["case"]
