"""The check before the timing: it accepts what is right and refuses what is not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lather.bench import check, contestants
from lather.bench.check import TOLERANCE, CheckError, check_case, error_of_ours, shrunk
from lather.bench.contestants import OURS, PEERS, RULE, SETS, Contestant, gradient_pool, make_contestant

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["experts", "experts_3d", "big"])
def test_copies_are_small_and_keep_the_layout(name: str) -> None:
    small = shrunk(SETS[name])
    assert max(small.shape) == 24
    assert small.shape[0] < 24
    assert small.num_matrices <= 8
    assert small.matrix_layout == SETS[name].matrix_layout


@pytest.mark.parametrize("frequency", [1, 4])
@pytest.mark.parametrize("name", ["tiny", "tiny_3d"])
def test_ours_agrees_with_the_naive_soap(name: str, frequency: int) -> None:
    assert check_case(SETS[name], frequency, (), CPU)["error_of_lather"] < TOLERANCE / 10


@pytest.mark.parametrize(("option", "wrong"), [("shampoo_beta", 0.95 * 0.99), ("lr", 1.01e-3), ("betas", (0.95, 0.95 * 0.99))])
def test_an_error_of_one_percent_is_refused(monkeypatch: pytest.MonkeyPatch, option: str, wrong: Any) -> None:
    monkeypatch.setattr(contestants, "LATHER_OPTIONS", {option: wrong})
    with pytest.raises(CheckError, match="naive fp64 SOAP"):
        check_case(SETS["tiny"], 2, (), CPU)


def test_another_frequency_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_half_the_frequency(name: str, matrices: Any, frequency: int, pool: Any, **more: Any) -> Contestant:
        return make_contestant(name, matrices, 2 * frequency, pool, **more)

    monkeypatch.setattr(check, "make_contestant", at_half_the_frequency)
    assert error_of_ours(SETS["tiny"], 4, CPU) > TOLERANCE
    monkeypatch.setattr(check, "error_of_ours", lambda *_: 0.0)
    with pytest.raises(CheckError, match="not once in steps 2 to 5"):
        check_case(SETS["tiny"], 4, (), CPU)


@pytest.mark.parametrize("frequency", [1, 10])
def test_peers_follow_the_same_rule(frequency: int) -> None:
    for peer in PEERS:
        pytest.importorskip(peer)
    cosines = check_case(SETS["tiny_3d"], frequency, PEERS, CPU)["cosine"]
    assert cosines.keys() == set(PEERS)
    assert min(cosines.values()) > 0.97


def test_a_peer_with_another_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def adam_for_peers(name: str, matrices: Any, frequency: int, pool: Any, **more: Any) -> Contestant:
        contestant = make_contestant(OURS, matrices, frequency, pool, **more)
        if name != OURS:
            contestant.optimizer = torch.optim.AdamW(contestant.params, lr=RULE["lr"], betas=RULE["betas"])
        return contestant

    monkeypatch.setattr(check, "make_contestant", adam_for_peers)
    monkeypatch.setattr(check, "_bases", lambda contestant: [torch.tensor(contestant.num_steps)])
    with pytest.raises(CheckError, match="cosine 0"):
        check_case(SETS["experts"], 1, ("heavyball",), CPU)


def test_all_contestants_get_the_same_start_and_gradients() -> None:
    pool = gradient_pool(SETS["tiny_3d"], CPU)
    assert torch.equal(pool[0], gradient_pool(SETS["tiny_3d"], CPU)[0])
    assert not torch.equal(pool[0], pool[1])
    for name in (OURS, *PEERS):
        if name != OURS:
            pytest.importorskip(name)
        contestant = make_contestant(name, SETS["tiny_3d"], 1, pool)
        ours = name == OURS
        assert [tuple(p.shape) for p in contestant.params] == [(4, 8, 16)] * 2 if ours else [(8, 16)] * 8
        for batch, gradients in zip(pool, contestant.gradients, strict=True):
            assert torch.equal(torch.cat([g.view(-1, 8, 16) for g in gradients]), batch)
