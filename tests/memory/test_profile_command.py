"""`lather profile` as a user meets it: tables, files, and one clear line for everything that can be
put right."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from torch import Tensor

from forked import fresh_python
from lather.cli import main
from lather.models.decoder import Decoder, DecoderOutput
from lather.models.layers import MEMORY_MODES
from memory.written_profile import from_json
from tiny_run import command, write_config

ROWS = 2 * 16
"""Tokens in a micro-batch of the tiny configuration: D = 16, F = 8, E = 4, K = 2, one dense and one
MoE block with a shared expert."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("profile"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    """Run the command; returns status, lines of output, and errors."""
    capsys.readouterr()
    status = main(["profile", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def document(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(path.read_text())
    return parsed


def test_tables_json_and_picture(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines, err = run(
        capsys, config, "--json", tmp_path / "p.json", "--out", tmp_path / "p.png"
    )
    assert (status, err) == (0, "")
    titles = [line.strip() for line in lines]
    assert {
        "embed_tokens",
        "layers.0",
        "layers.1",
        "norm",
        "loss",
        "kept for backward, each storage once",
    } <= set(titles)
    assert "one micro-batch of 2 x 16 tokens, fp32, memory 'saved'" in titles
    assert titles[-2:] == [str(tmp_path / "p.json"), str(tmp_path / "p.png")]
    assert matplotlib.image.imread(tmp_path / "p.png").std() > 0

    written = document(tmp_path / "p.json")
    assert (written["measured_blocks"], written["precision"], written["torch"]) == (
        "all",
        "fp32",
        torch.__version__,
    )
    assert (
        written["micro_batch_size"],
        written["sequence_length"],
        written["model"]["hidden_size"],
    ) == (2, 16, 16)
    (mode,) = written["profiles"]
    assert mode == "saved"
    profile = from_json(written["profiles"]["saved"])
    assert profile.num_tokens == ROWS
    gate_up = [
        one
        for one in profile.storages
        if one.layer == "layers.1" and one.segment == "run_experts" and one.shape[-1:] == (2 * 8,)
    ]
    # T K 2F elements in fp32
    assert [one.bytes for one in gate_up if one.kind == "activation"] == [ROWS * 2 * 2 * 8 * 4]
    assert profile.bytes("activation", segment="dispatch") == 0
    assert profile.bytes("weight", segment="run_experts") == (3 * 16 * 24 + 4 * 3 * 16 * 8) * 4


def test_comparison_of_all_modes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines, _ = run(
        capsys, config, "--compare", "--json", tmp_path / "p.json", "--out", tmp_path / "p.png"
    )
    assert status == 0
    profiles = {
        mode: from_json(one) for mode, one in document(tmp_path / "p.json")["profiles"].items()
    }
    assert tuple(profiles) == MEMORY_MODES
    sizes = {mode: profile.bytes("activation") for mode, profile in profiles.items()}
    assert sizes["recompute"] < sizes["saved"] < sizes["reference"]
    (model,) = (line.split() for line in lines if line.split()[:1] == ["model"])
    kib = {mode: f"{size / ROWS / 1024:,.2f}" for mode, size in sizes.items()}
    ratio = {mode: f"{size / sizes['reference']:.2f}" for mode, size in sizes.items()}
    assert model == [
        "model",
        kib["saved"],
        ratio["saved"],
        "x",
        kib["recompute"],
        ratio["recompute"],
        "x",
        kib["reference"],
    ]
    attention = {
        mode: profile.bytes("activation", segment="attend_and_route")
        for mode, profile in profiles.items()
    }
    assert attention["saved"] == attention["recompute"] < 0.7 * attention["reference"]
    assert matplotlib.image.imread(tmp_path / "p.png").std() > 0


def test_a_mesh_changes_the_micro_batch_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data rank has 4 micro-batches of 2 of the 16 sequences on 2 x 2 ranks."""
    mesh = ("--parallel.pp", 2, "--parallel.ep", 2, "--model.num-hidden-layers", 4)
    batch = ("--train.batch-size", 16, "--train.micro-batch-size", 0)
    status, _, err = run(capsys, config, *mesh, *batch, "--json", tmp_path / "p.json")
    assert (status, err) == (0, "")
    on_mesh = document(tmp_path / "p.json")
    assert run(capsys, config, *mesh[-2:], "--json", tmp_path / "p.json")[0] == 0
    assert on_mesh == document(tmp_path / "p.json")


def test_distinct_layers_give_what_all_give(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = {}
    for layers in ("all", "distinct"):
        arguments = (
            "--model.num-hidden-layers",
            4,
            "--layers",
            layers,
            "--json",
            tmp_path / "p.json",
        )
        status, lines, _ = run(capsys, config, *arguments)
        assert status == 0
        written[layers] = document(tmp_path / "p.json")
        assert any("measured on 3 of 4 blocks" in line for line in lines) == (layers == "distinct")
    assert written["distinct"]["measured_blocks"] == [0, 1, 2]
    whole, cut = (written[layers]["profiles"]["saved"] for layers in ("all", "distinct"))
    for key in ("bytes", "layers", "activation_bytes_per_token"):
        assert whole[key] == cut[key]


def test_big_models_are_cut_without_being_asked(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lather.commands.profile.MOST_PARAMETERS", 1000)
    assert (
        run(capsys, config, "--model.num-hidden-layers", 4, "--json", tmp_path / "p.json")[0] == 0
    )
    assert document(tmp_path / "p.json")["measured_blocks"] == [0, 1, 2]


def test_overrides_change_batch_precision_and_mode(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, other = tmp_path / "plain.json", tmp_path / "other.json"
    assert run(capsys, config, "--json", plain)[0] == 0
    arguments = (
        "--train.micro-batch-size",
        4,
        "--train.sequence-length",
        8,
        "--train.precision",
        "bf16",
        "--moe.memory",
        "reference",
    )
    assert run(capsys, config, *arguments, "--json", other)[0] == 0
    (before,), (after,) = (document(path)["profiles"].values() for path in (plain, other))
    assert before["num_tokens"] == after["num_tokens"] == ROWS
    assert before["bytes"]["weight copy"] == 0 < after["bytes"]["weight copy"]
    assert list(document(other)["profiles"]) == ["reference"]
    shapes = {tuple(one["shape"]) for one in after["storages"]}
    assert (4, 8) in shapes  # these are the tokens


def test_documents_stay_apart_where_attention_is_packed(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Tensor | None] = []
    forward = Decoder.forward

    def seen(self: Decoder, *arguments: Any, **keywords: Any) -> DecoderOutput:
        given.append(keywords["cu_seqlens"])
        return forward(self, *arguments, **keywords)

    monkeypatch.setattr(Decoder, "forward", seen)
    written = []
    for options, ending in (([], ""), (["--data.packed-attention"], ", 4 documents per sequence")):
        status, lines, _ = run(capsys, config, *options, "--json", tmp_path / "p.json")
        assert status == 0
        assert f"one micro-batch of 2 x 16 tokens, fp32{ending}, memory 'saved'" in lines
        written.append(document(tmp_path / "p.json"))
    assert given[0] is None
    assert given[1] is not None
    assert given[1].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    assert [one["documents_per_sequence"] for one in written] == [1, 4]
    plain, packed = (one["profiles"]["saved"]["bytes"]["activation"] for one in written)
    assert packed > plain  # attention without documents needs no mask

    for length, expected in ((6, [0, 2, 4, 6, 8, 10, 12]), (1, [0, 1, 2])):
        assert (
            run(capsys, config, "--data.packed-attention", "--train.sequence-length", length)[0]
            == 0
        )
        assert given[-1] is not None
        assert given[-1].tolist() == expected


def test_files_are_written_for_a_reader_that_leaves_early(config: Path, tmp_path: Path) -> None:
    """The reader of `lather profile ... | head` leaves; here before the first line, so that the
    pipe is closed whatever the machine's speed."""
    arguments = ("profile", config, "--json", tmp_path / "p.json", "--out", tmp_path / "p.png")
    process = fresh_python(command(*arguments)[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=120) == 0, process.stderr.read()
    assert process.stderr.read() == ""
    assert {path.name for path in tmp_path.iterdir()} == {"p.json", "p.png"}
    assert from_json(document(tmp_path / "p.json")["profiles"]["saved"]).num_tokens == ROWS


def test_the_picture_is_of_the_configuration(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(
        "lather.memory.profile_report._save",
        lambda figure, axes, out: titles.append(axes.get_title()),
    )
    for options in ([], ["--compare"]):
        assert main(["profile", str(config), "--out", str(tmp_path / "p.png"), *options]) == 0
    assert titles[0].startswith("tiny: kept for backward, memory 'saved'\n2 x 16 tokens, fp32\n")
    assert titles[1] == "tiny: kept for backward\n2 x 16 tokens, fp32"


def test_the_run_directory_is_not_touched(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, config, "--run-dir", tmp_path / "run")[0] == 0
    assert list(tmp_path.iterdir()) == []
    assert not (config.parent / "data").exists()
