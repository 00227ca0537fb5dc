"""The check before the timing accepts what is right and refuses what is wrong."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import check, contestants
from benchmarks.check import TOLERANCE, CheckError, check_case, error_of_ours
from benchmarks.contestants import (
    OPTIONS,
    OURS,
    PEERS,
    SETS,
    Contestant,
    OptimizerCase,
    gradient_pool,
    make_contestant,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("frequency", [1, 4])
@pytest.mark.parametrize("name", ["tiny", "tiny_3d"])
def test_ours_agrees_with_the_plain_soap(name: str, frequency: int) -> None:
    assert (
        check_case(OptimizerCase("soap", SETS[name], frequency), (), CPU)["error_of_lather"]
        < TOLERANCE / 10
    )


@pytest.mark.parametrize("name", ["tiny", "tiny_3d"])
@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_ours_agrees_with_the_plain_program_and_with_torch(rule: str, name: str) -> None:
    checked = check_case(OptimizerCase(rule, SETS[name]), PEERS[rule], CPU)
    assert checked["error_of_lather"] < TOLERANCE / 10
    assert checked["cosine"].keys() == {"torch"}


@pytest.mark.parametrize(
    ("rule", "option", "wrong"),
    [
        ("soap", "shampoo_beta", 0.95 * 0.99),
        ("soap", "lr", 1.01e-3),
        ("soap", "betas", (0.95, 0.95 * 0.99)),
        ("muon", "momentum", 0.95 * 0.99),
        ("muon", "nesterov", False),
        ("adamw", "betas", (0.9, 0.95 * 0.99)),
        ("adamw", "weight_decay", 0.5),
    ],
)
def test_another_option_is_refused(
    monkeypatch: pytest.MonkeyPatch, rule: str, option: str, wrong: Any
) -> None:
    monkeypatch.setattr(contestants, "lather_options", lambda rule, frequency: {option: wrong})
    with pytest.raises(CheckError, match=f"plain fp64 {rule}"):
        check_case(OptimizerCase(rule, SETS["tiny"], 2 if rule == "soap" else 1), (), CPU)


def test_another_frequency_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_half_the_frequency(
        name: str, matrices: Any, frequency: int, pool: Any, **more: Any
    ) -> Contestant:
        return make_contestant(name, matrices, 2 * frequency, pool, **more)

    monkeypatch.setattr(contestants, "make_contestant", at_half_the_frequency)
    case = OptimizerCase("soap", SETS["tiny"], 4)
    assert error_of_ours(case, CPU) > TOLERANCE
    monkeypatch.setattr(check, "error_of_ours", lambda *_: 0.0)
    with pytest.raises(CheckError, match="not once in steps 2 to 5"):
        check_case(case, (), CPU)


@pytest.mark.parametrize("frequency", [1, 10])
def test_peers_follow_the_same_rule(frequency: int) -> None:
    for peer in PEERS["soap"]:
        pytest.importorskip(peer)
    cosines = check_case(OptimizerCase("soap", SETS["tiny_3d"], frequency), PEERS["soap"], CPU)[
        "cosine"
    ]
    assert cosines.keys() == set(PEERS["soap"])
    assert min(cosines.values()) > 0.97


def test_a_peer_with_another_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def adam_for_peers(
        name: str, matrices: Any, frequency: int, pool: Any, **more: Any
    ) -> Contestant:
        contestant = make_contestant(OURS, matrices, frequency, pool, **more)
        if name != OURS:
            contestant.optimizer = torch.optim.AdamW(
                contestant.params, lr=1e-3, betas=OPTIONS["soap"]["betas"]
            )
        return contestant

    monkeypatch.setattr(contestants, "make_contestant", adam_for_peers)
    monkeypatch.setattr(
        check, "_bases", lambda contestant, case: [torch.tensor(contestant.num_steps)]
    )
    with pytest.raises(CheckError, match="cosine 0"):
        check_case(OptimizerCase("soap", SETS["experts"]), ("heavyball",), CPU)


def test_all_contestants_get_the_same_start_and_gradients() -> None:
    pool = gradient_pool(SETS["tiny_3d"], CPU)
    assert torch.equal(pool[0], gradient_pool(SETS["tiny_3d"], CPU)[0])
    assert not torch.equal(pool[0], pool[1])
    for name in (OURS, *PEERS["soap"]):
        if name != OURS:
            pytest.importorskip(name)
        contestant = make_contestant(name, SETS["tiny_3d"], 1, pool)
        ours = name == OURS
        assert (
            [tuple(p.shape) for p in contestant.params] == [(4, 8, 16)] * 2
            if ours
            else [(8, 16)] * 8
        )
        for batch, gradients in zip(pool, contestant.gradients, strict=True):
            assert torch.equal(torch.cat([g.view(-1, 8, 16) for g in gradients]), batch)
