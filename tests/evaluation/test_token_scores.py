"""Log-probabilities and routing of given tokens against one document at a time, and the command
that writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lather.cli import main
from lather.evaluation.token_scores import score_tokens
from models.tiny import KINDS, random_tokens, tiny_family_model
from tiny_run import write_config

LENGTHS = (5, 1, 9, 2, 7)
DOCUMENTS = [random_tokens(1, n, seed=n)[0].tolist() for n in LENGTHS]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@torch.no_grad()
@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("model_type", KINDS)
def test_scores_are_those_of_each_document_by_itself(model_type: str, batch_size: int) -> None:
    model = tiny_family_model(model_type).double()
    scores = list(score_tokens(model, DOCUMENTS, batch_size))
    assert len(scores) == len(DOCUMENTS)
    for document, scored in zip(DOCUMENTS, scores, strict=True):
        tokens = torch.tensor([document])
        output = model(tokens)
        logprobs = F.log_softmax(output.logits_BSV[0], -1)[:-1]
        expected = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
        assert scored.logprobs_T[0].isnan()
        assert torch.allclose(scored.logprobs_T[1:], expected, rtol=0, atol=1e-12)
        assert scored.routing_TLK.shape[:2] == (len(document), len(output.routings))
        for layer, routing in enumerate(output.routings):
            assert torch.equal(scored.routing_TLK[:, layer].long(), routing.experts_TK)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    config = write_config(folder, steps=2)
    options = ["--run-dir", str(folder / "run"), "--log.sample-tokens", "0"]
    assert main(["train", str(config), *options]) == 0
    return folder / "run"


def test_the_command_adds_fields_and_changes_no_others(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"tokens": document, "weights": 0.5, "é": number}
        for number, document in enumerate(DOCUMENTS)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = [str(run), str(tmp_path / "rows.jsonl"), str(tmp_path / "out.jsonl")]
    assert main(["score", *names, "--routing", "--batch-size", "2"]) == 0
    assert f"{names[2]}: 5 rows, scored by {run}/checkpoints" in capsys.readouterr().out
    scored = read_rows(tmp_path / "out.jsonl")
    for row, found in zip(rows, scored, strict=True):
        logprobs, routing = found.pop("logprobs"), found.pop("routing")
        assert found == row
        assert logprobs[0] is None
        assert len(logprobs) == len(routing) == len(row["tokens"])
        assert all(-math.inf < each < 0 for each in logprobs[1:])
    # a data set takes the routing, and OUT may be ROWS
    before = read_rows(tmp_path / "out.jsonl")
    made = ["data", "make", str(tmp_path / "rows"), names[2], "--token-rows"]
    assert main([*made, "--vocab-size", "300", "--holdout-every", "0"]) == 0
    assert (tmp_path / "rows/train-00000-000.routing.npy").exists()
    from_disk = ["--batch-size", "2", "--layerwise", "always"]
    assert main(["score", names[0], names[2], names[2], *from_disk]) == 0
    assert read_rows(tmp_path / "out.jsonl") == before


def test_a_model_without_experts_has_no_routing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = ["--model.first-k-dense-replace", "2", "--train.steps", "1"]
    options = ["--run-dir", str(tmp_path / "dense"), "--log.sample-tokens", "0", *dense]
    assert main(["train", str(run.parent / "tiny.toml"), *options]) == 0
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1, 2]}')
    names = [str(tmp_path / name) for name in ("dense", "rows.jsonl", "out.jsonl")]
    assert main(["score", *names, "--routing"]) == 2
    assert "--routing needs MoE layers" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
    assert main(["score", *names]) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"tokens": []}', "line 2: no row of tokens: tokens is empty: correct the line"),
        ("{", "line 2: broken JSON"),
        ('{"tokens": [1, 100000]}', "line 2: token 100000 is outside the model's vocabulary"),
        (json.dumps({"tokens": [1] * 5000}), "line 2: 5,000 tokens, but the model reads"),
    ],
)
def test_a_line_that_is_no_row_is_an_error(
    run: Path, tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1]}\n' + line)
    out = tmp_path / "out.jsonl"
    assert main(["score", str(run), str(tmp_path / "rows.jsonl"), str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
