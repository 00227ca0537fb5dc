"""Tables, JSON and pictures of profiles whose numbers are known."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from lather.errors import UserError
from lather.files import write_numbers
from lather.memory import profile_report as report
from lather.memory.profile import SEGMENTS, Kind, SavedStorage, SavedTensors
from memory.written_profile import from_json

MIB = 2**20


def storage(
    layer: str, segment: str, size: int, kind: Kind = "activation", **changes: Any
) -> SavedStorage:
    values: dict[str, Any] = {
        "layer": layer,
        "segment": segment,
        "module": f"{layer}.mlp",
        "saved_by": "MmBackward0.self",
        "shape": (size // 4,),
        "dtype": "float32",
        "bytes": size,
        "kind": kind,
        "weight": "" if kind == "activation" else f"{layer}.mlp.w",
        "num_saves": 1,
        "also_saved_in": (),
    }
    return SavedStorage(**{**values, **changes})


def example(scale: int = 1) -> SavedTensors:
    """A profile in which layers 1 and 2 keep the same, and layer 0 something else."""
    storages = [
        storage("embed_tokens", "embedding", 1 * MIB),
        storage(
            "layers.0",
            "attend_and_route",
            2 * scale * MIB,
            also_saved_in=("layers.0 aggregate", "layers.1 aggregate"),
        ),
    ]
    for layer in ("layers.1", "layers.2"):
        storages += [
            storage(layer, "aggregate", 8 * MIB),
            storage(layer, "run_experts", 3 * scale * MIB, num_saves=2),
            storage(layer, "run_experts", 16 * MIB, "weight"),
            storage(layer, "run_experts", 32 * MIB, "weight copy"),
        ]
    return SavedTensors(tuple(storages), 1024)


def printed(show: Callable[[Console], None]) -> list[list[str]]:
    """Return the words of each printed line."""
    console = Console(file=io.StringIO(), width=150)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines() if line.strip()]


# --- JSON -----------------------------------------------------------------------------------------


def test_json_gives_the_profile_back(tmp_path: Path) -> None:
    write_numbers(tmp_path / "out.json", report.to_json(example()))
    document = json.loads((tmp_path / "out.json").read_text())
    assert from_json(document) == example()
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_json_totals_are_the_storages() -> None:
    document = report.to_json(example())
    assert document["bytes"] == {
        "activation": 25 * MIB,
        "weight copy": 64 * MIB,
        "weight": 32 * MIB,
    }
    assert document["activation_bytes_per_token"] == 25 * 1024
    assert document["activation_bytes_per_segment"] == {
        "embedding": MIB,
        "attend_and_route": 2 * MIB,
        "run_experts": 6 * MIB,
        "aggregate": 16 * MIB,
    }
    assert document["layers"]["layers.1"] == {
        "bytes": {"activation": 11 * MIB, "weight copy": 32 * MIB, "weight": 16 * MIB},
        "activation_bytes_per_segment": {"run_experts": 3 * MIB, "aggregate": 8 * MIB},
    }
    assert list(document["layers"]) == ["embed_tokens", "layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("drawing")],
    ids=["full", "other"],
)
def test_a_file_that_fails_leaves_the_old_one_and_nothing_else(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object, out: Path, **_: object) -> None:
        out.write_text("the beginning")
        raise error

    monkeypatch.setattr(Figure, "savefig", fails)
    (tmp_path / "out.png").write_text("old")
    with pytest.raises(UserError if isinstance(error, OSError) else RuntimeError):
        report.draw(example(), "title", tmp_path / "out.png")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.png", "old")]
    (tmp_path / "out.json").mkdir()
    with pytest.raises(UserError, match=r"out\.json: cannot be written"):
        write_numbers(tmp_path / "out.json", {})
    assert {path.name for path in tmp_path.iterdir()} == {"out.png", "out.json"}


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"absent/out\.json: cannot be written .*: give another --json"
    ):
        write_numbers(tmp_path / "absent" / "out.json", {})
    with pytest.raises(
        UserError, match=r"absent/out\.png: cannot be written .*: give another --out"
    ):
        report.draw(example(), "title", tmp_path / "absent" / "out.png")


# --- tables ---------------------------------------------------------------------------------------


def test_layers_that_keep_the_same_are_alike() -> None:
    assert report.alike(example()) == [["embed_tokens"], ["layers.0"], ["layers.1", "layers.2"]]
    different = (
        *example().storages[:-1],
        storage("layers.2", "run_experts", 31 * MIB, "weight copy"),
    )
    assert report.alike(SavedTensors(different, 1)) == [
        ["embed_tokens"],
        ["layers.0"],
        ["layers.1"],
        ["layers.2"],
    ]


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        (["norm"], "norm"),
        (["layers.3"], "layers.3"),
        (["layers.1", "layers.2", "layers.3", "layers.5"], "layers.1-3, 5"),
        (["layers.0", "layers.2"], "layers.0, 2"),
        (["norm", "other_norm"], "norm, other_norm"),
    ],
    ids=str,
)
def test_names_of_alike_layers(layers: list[str], name: str) -> None:
    assert report.name_of(layers) == name


def test_storages_that_differ_in_rows_alone_make_one_line() -> None:
    """Plain autograd keeps a few tensors for each expert; chance decides how many rows each has."""

    def experts(layer: str, *rows: int) -> list[SavedStorage]:
        return [storage(layer, "run_experts", 4 * 6 * n, shape=(n, 6)) for n in rows]

    other = storage("layers.0", "run_experts", 4 * 7, shape=(1, 7))
    weights = [
        storage("layers.0", "run_experts", 24, "weight", weight=name)
        for name in ("layers.0.a", "layers.0.b")
    ]
    profile = SavedTensors((*experts("layers.0", 3, 5), other, *weights), 1)
    lines = report.lines_of(profile, "layers.0")
    assert [
        (line.shape, line.bytes, count) for line, count in lines if line.kind == "activation"
    ] == [
        ((-1, 6), 4 * 6 * 8, 2),
        ((1, 7), 28, 1),
    ]
    assert [(line.weight, count) for line, count in lines if line.kind == "weight"] == [
        ("a", 1),
        ("b", 1),
    ]
    alike = SavedTensors((*experts("layers.0", 3, 5), *experts("layers.1", 1, 7)), 1)
    assert report.alike(alike) == [["layers.0", "layers.1"]]


def test_the_list_has_every_tensor_of_distinct_layers() -> None:
    lines = printed(lambda console: report.print_tensors(example(), console))
    assert ["layers.1-2:", "2", "layers,", "each"] in lines
    assert ["mlp:", "Mm.self", "2097152", "float32", "activation", "8.00", "MiB"] in lines
    assert ["mlp:", "Mm.self", "4194304", "float32", "weight", "16.00", "MiB", "mlp.w"] in lines
    assert [
        "mlp:",
        "Mm.self",
        "8388608",
        "float32",
        "weight",
        "copy",
        "32.00",
        "MiB",
        "mlp.w",
    ] in lines
    assert ["run_experts", "51.00", "MiB"] in lines
    assert [
        "mlp:",
        "Mm.self",
        "524288",
        "float32",
        "activation",
        "2.00",
        "MiB",
        "2",
        "other",
        "segments",
    ] in lines
    # segments are in the order of the pass
    assert lines.index(["run_experts", "51.00", "MiB"]) < lines.index(["aggregate", "8.00", "MiB"])
    assert sum("layers.2" in line for line in lines) == 0


def test_the_totals_are_per_layer_segment_and_model() -> None:
    lines = printed(lambda console: report.print_totals(example(), console))
    assert [
        "MiB",
        "embedding",
        "attend_and_route",
        "run_experts",
        "aggregate",
        "activations",
        "weight",
        "copies",
        "weights",
    ] in lines
    assert ["layers.0", "-", "2.00", "-", "-", "2.00", "-", "-"] in lines
    assert ["layers.1-2", "(each)", "-", "-", "3.00", "8.00", "11.00", "32.00", "16.00"] in lines
    assert ["model", "1.00", "2.00", "6.00", "16.00", "25.00", "64.00", "32.00"] in lines
    assert ["KiB", "per", "token", "1.00", "2.00", "6.00", "16.00", "25.00"] in lines


def test_the_comparison_has_sizes_and_ratios() -> None:
    profiles = {"lean": example(), "plain": example(scale=4), "none": SavedTensors((), 1024)}
    lines = printed(lambda console: report.print_comparison(profiles, "plain", console))
    assert ["KiB", "per", "token", "lean", "to", "plain", "plain", "none", "to", "plain"] in lines
    assert ["attend_and_route", "2.00", "0.25", "x", "8.00", "-", "0.00", "x"] in lines
    assert ["aggregate", "16.00", "1.00", "x", "16.00", "-", "0.00", "x"] in lines
    assert ["model", "25.00", "0.51", "x", "49.00", "-", "0.00", "x"] in lines
    assert ["weight", "copy,", "MiB", "64.00", "64.00", "-"] in lines


def test_a_segment_that_the_baseline_does_not_have_has_no_ratio() -> None:
    profiles = {"lean": example(), "plain": SavedTensors((), 1024)}
    lines = printed(lambda console: report.print_comparison(profiles, "plain", console))
    assert ["aggregate", "16.00", "-", "-"] in lines


# --- pictures -------------------------------------------------------------------------------------


@pytest.fixture
def drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Callable[[Path], None]], Figure]:
    """Catch the figure that would have been saved."""

    def figure_of(draw: Callable[[Path], None]) -> Figure:
        figures: list[Figure] = []

        def savefig(figure: Figure, out: Path, **_: object) -> None:
            figures.append(figure)
            out.touch()

        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", savefig)
            draw(tmp_path / "unused.png")
        return figures[0]

    return figure_of


def test_the_picture_has_a_bar_per_layer_and_a_part_per_segment(
    drawn: Callable[..., Figure],
) -> None:
    figure = drawn(lambda out: report.draw(example(), "a title", out))
    (axes,) = figure.axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {
        "embedding": [1, 0, 0, 0],
        "attend_and_route": [0, 2, 0, 0],
        "run_experts": [0, 0, 3, 3],
        "aggregate": [0, 0, 8, 8],
    }
    assert [bar.get_y() for bar in axes.containers[-1]] == [1, 2, 3, 3]  # bars lie on top of others
    assert [label.get_text() for label in axes.get_xticklabels()] == ["embed", "0", "1", "2"]
    assert (
        axes.get_title()
        == "a title\n25.00 KiB of activations per token, 25.00 MiB in all; weight copies 64.00 MiB"
    )
    assert axes.get_ylabel() == "KiB per token"
    assert {text.get_text() for text in figure.legends[0].get_texts()} == heights.keys()
    assert_starts_at_0(axes, highest=11)


def test_the_comparison_has_a_bar_per_mode(drawn: Callable[..., Figure]) -> None:
    profiles = {"lean": example(), "plain": example(scale=4)}
    figure = drawn(lambda out: report.draw_comparison(profiles, "plain", "a title", out))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["lean", "plain"]
    assert [sum(bars[index].get_height() for bars in axes.containers) for index in (0, 1)] == [
        25,
        49,
    ]
    texts = [text.get_text() for text in axes.texts]
    assert "25.00 KiB\n0.51 x" in texts
    assert "49.00 KiB" in texts
    assert "16.00" in texts  # larger parts have numbers
    assert "1.00" not in texts  # small parts have none
    assert axes.get_ylabel() == "KiB of activations per token"
    assert_starts_at_0(axes, highest=49)


def test_every_number_in_a_picture_is_in_the_unit_of_its_axis(drawn: Callable[..., Figure]) -> None:
    """The highest bar decides about the unit: whole modes have MiB, single layers KiB."""
    profiles = {
        name: SavedTensors(example(scale).storages, 16)
        for name, scale in (("lean", 1), ("plain", 4))
    }
    (axes,) = drawn(lambda out: report.draw_comparison(profiles, "plain", "a title", out)).axes
    assert axes.get_ylabel() == "MiB of activations per token"
    texts = [text.get_text() for text in axes.texts]
    assert {"1.56 MiB\n0.51 x", "3.06 MiB", "1.00", "0.38", "1.50"} <= set(texts)
    assert [sum(bars[index].get_height() for bars in axes.containers) for index in (0, 1)] == [
        25 / 16,
        49 / 16,
    ]

    (axes,) = drawn(lambda out: report.draw(profiles["lean"], "a title", out)).axes
    assert axes.get_ylabel() == "KiB per token"
    assert "\n1,600.00 KiB of activations per token, 25.00 MiB in all" in axes.get_title()


def test_nothing_kept_is_a_picture_too(drawn: Callable[..., Figure]) -> None:
    (axes,) = drawn(
        lambda out: report.draw_comparison({"lean": SavedTensors((), 1)}, "lean", "a title", out)
    ).axes
    assert (axes.get_ylabel(), axes.get_ylim()) == ("KiB of activations per token", (0, 1))
    assert [text.get_text() for text in axes.texts] == ["0.00 KiB"]


def assert_starts_at_0(axes: Axes, highest: float) -> None:
    low, high = axes.get_ylim()
    assert low == 0
    assert 0 in axes.get_yticks()
    assert 1.02 * highest < high < 1.3 * highest  # there is room above the highest bar


def test_every_segment_has_a_color_of_its_own() -> None:
    assert set(report.COLORS) == set(SEGMENTS)
    assert len(set(report.COLORS.values())) == len(SEGMENTS)


def test_pictures_are_written(tmp_path: Path) -> None:
    report.draw(example(), "title", tmp_path / "one.png")
    report.draw_comparison(
        {"lean": example(), "plain": example(scale=4)}, "plain", "title", tmp_path / "two.png"
    )
    pictures = [imread(tmp_path / name) for name in ("one.png", "two.png")]
    for picture in pictures:
        height, width, _ = picture.shape
        assert height > 300
        assert width > 500
        assert len(np.unique(picture[..., :3].reshape(-1, 3), axis=0)) > 20
    assert pictures[0].shape != pictures[1].shape or (pictures[0] != pictures[1]).any()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1.00 KiB"),
        (3 * MIB / 2, "1.50 MiB"),
        (5 * 2**30, "5.00 GiB"),
    ],
)
def test_sizes(size: float, text: str) -> None:
    assert report._size(size) == text
