"""Where the time of a step goes, from traces by hand, whose every microsecond is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lather.train.profile_picture import ORDER, colors_of_kinds, colors_of_phases, draw_step_times
from lather.train.step_times import (
    ELEMENTWISE,
    IDLE,
    KINDS,
    PHASES,
    StepTimes,
    TraceEvent,
    kind_of,
    read_events,
    step_times,
)

NAMED, OP = "user_annotation", "cpu_op"


def event(
    name: str, start: float, end: float, category: str = NAMED, number: int | None = None
) -> TraceEvent:
    return TraceEvent(name, category, 7, start, end, number)


HOST_TRACE = [
    event("lather.step.3", 100, 200),
    event("lather.data", 100, 105),
    event("lather.action.0F0", 105, 150),
    event("lather.forward", 105, 150),
    event("lather.segment.attention", 110, 140),
    event("aten::linear", 110, 130, OP),
    event("aten::addmm", 112, 128, OP),
    event("aten::softmax", 130, 138, OP),
    event("lather.exchange.wait", 140, 148),
    event("lather.optimizer", 160, 190),
    event("lather.optim.update", 160, 190),
    event("lather.optim.refresh", 170, 180),
    event("aten::_linalg_eigh", 172, 178, OP),
    event("aten::mm", 300, 400, OP),  # a validation after the step
    TraceEvent("aten::mm", OP, 8, 100, 200),  # another thread
]


def microseconds(times: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds * 1e6, 3) for name, seconds in times.items()}


def test_the_host_s_time_belongs_to_the_innermost_phase_and_operation() -> None:
    times = step_times(HOST_TRACE)
    assert times.seconds == pytest.approx(100e-6)
    assert microseconds(times.by_phase) == {
        "data": 5,
        "forward": 37,
        "exchange of tokens": 8,
        "optimizer": 20,
        "refreshes": 10,
        "other": 20,
    }
    assert microseconds(times.by_kind) == {
        "matrix products": 20,
        ELEMENTWISE: 8,
        "communication": 8,
        "decompositions": 6,
        "host": 58,
    }


def test_times_are_means_over_steps() -> None:
    second = [each._replace(start=each.start + 1e3, end=each.end + 1e3) for each in HOST_TRACE[1:]]
    both = [*HOST_TRACE, event("lather.step.4", 1100, 1300), *second]
    times = step_times(both)
    assert times.seconds == pytest.approx(150e-6)
    assert microseconds(times.by_phase)["forward"] == 37
    assert sum(times.by_phase.values()) == pytest.approx(times.seconds)
    assert sum(times.by_kind.values()) == pytest.approx(times.seconds)


def test_on_a_device_hidden_communication_does_not_count_and_phases_are_those_of_the_launch() -> (
    None
):
    host = [
        event("lather.step.3", 0, 100),
        event("lather.forward", 0, 10),
        event("cudaLaunchKernel", 1, 2, "cuda_runtime", 11),
        event("cudaLaunchKernel", 5, 6, "cuda_runtime", 12),
        event("lather.backward", 10, 20),
        event("cuLaunchKernel", 12, 13, "cuda_driver", 13),
        event("cudaMemcpyAsync", 14, 15, "cuda_runtime", 14),
    ]
    device = [
        event("sm90_xmma_gemm_bf16", 30, 50, "kernel", 11),
        event("ncclDevKernel_SendRecv", 40, 65, "kernel", 12),
        event("_softmax_kernel", 60, 70, "kernel", 13),
        event("Memcpy HtoD", 66, 80, "gpu_memcpy", 14),
        event("flash_fwd", 75, 78, "kernel", 99),  # its launch is not in the trace
    ]
    times = step_times([*host, *device])
    assert microseconds(times.by_kind) == {
        "matrix products": 20,
        "communication": 10,  # from 50 to 60
        ELEMENTWISE: 10,
        "attention": 3,
        "copies": 7,  # from 70 to 75, and from 78 to 80
        IDLE: 50,
    }
    assert microseconds(times.by_phase) == {"forward": 30, "backward": 17, "other": 3, IDLE: 50}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::baddbmm", "matrix products"),
        ("aten::_grouped_mm", "matrix products"),
        ("void cutlass::Kernel2<...>", "matrix products"),
        ("nvjet_tst_128x256_64x4", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90", "attention"),
        ("aten::linalg_cholesky_ex", "decompositions"),
        ("aten::linalg_vector_norm", ELEMENTWISE),
        ("aten::embedding", "indexing, sorting"),
        ("_gather_kernel", "indexing, sorting"),
        ("aten::copy_", "copies"),
        ("aten::to", "copies"),
        ("aten::topk", "indexing, sorting"),
        ("c10d::alltoall_base_", "communication"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("aten::transpose", "host"),
        ("autograd::engine::evaluate_function: MmBackward0", "host"),
        ("lather.segment.attention", "host"),
        ("lather.exchange.combine", "communication"),
        ("aten::add_", ELEMENTWISE),
        ("aten::tanh", ELEMENTWISE),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no range of a step"):
        step_times([event("aten::mm", 0, 1, OP)])


def test_events_are_read_one_after_the_other(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "[{"}},
        *(
            {"ph": "X", "cat": each.category, "name": each.name, "tid": 7}
            | {"ts": each.start, "dur": each.end - each.start, "args": {"correlation": 4}}
            for each in HOST_TRACE[:3]
        ),
        {"ph": "X", "cat": "Trace", "name": "x", "tid": "PyTorch", "ts": 1, "dur": 2},
    ]
    content = {"schemaVersion": 1, "traceEvents": events, "traceName": "{", "other": [{"ph": "X"}]}
    for indent in (None, 2):
        file.write_text(json.dumps(content, indent=indent))
        assert list(read_events(file)) == [each._replace(correlation=4) for each in HOST_TRACE[:3]]


def test_every_phase_and_kind_has_a_color_and_a_picture_is_drawn(tmp_path: Path) -> None:
    assert {*PHASES.values(), IDLE} == colors_of_phases().keys()
    assert {*KINDS, ELEMENTWISE, IDLE} == set(ORDER) == colors_of_kinds().keys()
    assert len(set(colors_of_kinds().values())) == len(ORDER)
    assert len(set(colors_of_phases().values())) == len(colors_of_phases())
    times = step_times(HOST_TRACE)
    for count in (1, 3, 200):
        draw_step_times([times] * count, tmp_path / "times.png", "a run")
        assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    draw_step_times([StepTimes(2.0, {"forward": 2.0}, {"host": 2.0})], tmp_path / "s.png", "")
