"""Special cases in which the family is another optimizer, or one member of the family is another
member."""

from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_KINDS,
    FULL_RANK,
    KINDS,
    MATRICES,
    SOAP_KINDS,
    WITH_EXPERTS,
    all_same,
    clones,
    coupled_decay,
    give_gradients,
    largest_difference,
    make,
    parameter,
    parameters,
    run,
    run_both,
    same,
)
from torch import Tensor

from lather.optim import KLSOAP, SOAP, EmbeddingSOAP, StackedSOAP
from lather.optim.rules.adamw import AdamWRule

every_kind = pytest.mark.parametrize("kind", KINDS)
few_kinds = pytest.mark.parametrize("kind", FEW_KINDS)


@pytest.mark.parametrize(
    "identity_basis",
    [{"max_precond_dim": 0}, {"adam_warmup_steps": 100}],
    ids=["no_factor", "warm_up"],
)
@pytest.mark.parametrize("kind", [kind for kind in SOAP_KINDS if kind != "soap_orthogonalized"])
def test_identity_basis_equals_adamw(kind: str, identity_basis: dict[str, Any]) -> None:
    settings = {"lr": 1e-2, "betas": (0.9, 0.97), "eps": 1e-6, "weight_decay": 0.1}
    ours = parameters(dtype=torch.float64)
    theirs, wrong = clones(ours), clones(ours)
    optimizer = make(kind, ours, **settings, **identity_basis, state_dtype=torch.float64)
    run_both((optimizer, ours), (torch.optim.AdamW(theirs, **settings), theirs), range(8))
    run(torch.optim.AdamW(wrong, **{**settings, "lr": 1.01e-2}), wrong, range(8))
    assert largest_difference(ours, theirs) <= 1e-14
    assert largest_difference(ours, wrong) > 1e-4


@pytest.mark.parametrize("cls", [SOAP, KLSOAP], ids=["SOAP", "KLSOAP"])
def test_coupled_decay_with_identity_basis_equals_adam(cls: Any) -> None:
    coupled = coupled_decay("soap" if cls is SOAP else "kl_soap")
    ours = parameters(dtype=torch.float64)
    theirs = clones(ours)
    a = cls(
        ours,
        lr=1e-2,
        weight_decay=0.3,
        max_precond_dim=0,
        betas=(0.9, 0.95),
        state_dtype=torch.float64,
        **coupled,
    )
    b = torch.optim.Adam(theirs, lr=1e-2, weight_decay=0.3, betas=(0.9, 0.95))
    run_both((a, ours), (b, theirs), range(8))
    assert largest_difference(ours, theirs) <= 1e-14


@pytest.mark.parametrize(
    ("method", "share"), [("decoupled", 0.1 * 0.5), ("independent", 0.5), ("palm", 0.1**2 * 0.5)]
)
def test_decoupled_decays_take_their_share(method: str, share: float) -> None:
    p = parameter(4, 5, dtype=torch.float64)
    start = p.detach().clone()
    p.grad = torch.zeros_like(p)
    KLSOAP([p], lr=0.1, weight_decay=0.5, weight_decay_method=method).step()
    assert largest_difference([p], [(1 - share) * start]) <= 1e-15
    assert largest_difference([p], [(1 - 1.01 * share) * start]) > 1e-5


@pytest.mark.parametrize("cls", [SOAP, KLSOAP], ids=["SOAP", "KLSOAP"])
def test_stacked_on_two_dims_is_exactly_tensor(cls: Any) -> None:
    params = parameters([(6, 4), (4, 7)])
    others = clones(params)
    options = {"lr": 1e-2, "precondition_frequency": 2}
    a, b = (
        cls(params, matrix_layout="stacked", **options),
        cls(others, matrix_layout="tensor", **options),
    )
    run_both((a, params), (b, others), range(7))
    assert all_same(params, others)


def test_stacked_soap_is_kl_soap_on_the_merged_matrix() -> None:
    for shape in ((3, 8, 4), (3, 4, 8)):
        p = parameter(*shape, dtype=torch.float64)
        b, m, n = shape

        def merged(x: Tensor, m: int = m, n: int = n, b: int = b) -> Tensor:
            return x.movedim(0, 1).reshape(m, b * n) if n <= m else x.reshape(b * m, n)

        q = torch.nn.Parameter(merged(p.detach()).clone())
        stacked, plain = (
            StackedSOAP([p], 1e-2, state_dtype=torch.float64),
            KLSOAP([q], 1e-2, state_dtype=torch.float64),
        )
        for step in range(6):
            give_gradients([p], step)
            q.grad = merged(p.grad).clone()
            stacked.step()
            plain.step()
        assert same(merged(p.detach()), q.detach())


@pytest.mark.parametrize(
    ("shape", "tolerance"), [((5, 16, 24), 0.0), ((3, 32, 32), 0.0), ((5, 7, 7), 1e-4)], ids=str
)
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "per_expert" in kind or kind == "soap_one_sided"]
)
def test_an_expert_alone_gives_the_same_as_in_a_stack(
    kind: str, shape: tuple[int, ...], tolerance: float
) -> None:
    """They are equal to the bit if every matrix of the stack starts on a cache line, on which MKL's
    results depend; otherwise up to rounding."""
    options = {
        "precondition_frequency": 2,
        "adam_warmup_steps": 3,
        **({"second_moment": "rotate"} if "soap" in kind else {}),
    }
    stack = [parameter(*shape)]
    alone = clones(stack[0].detach().unbind())
    together, apart = make(kind, stack, **options), make(kind, alone, **options)
    for step in range(9):
        give_gradients(stack, step)
        for p, g in zip(alone, stack[0].grad, strict=True):
            p.grad = g.clone()
        together.step()
        apart.step()
    assert largest_difference(alone, stack[0].unbind()) <= tolerance


@every_kind
def test_a_wide_matrix_is_its_transposed_tall_one(kind: str) -> None:
    wide, tall = (
        [parameter(5, 8, dtype=torch.float64)],
        [torch.nn.Parameter(parameter(5, 8, dtype=torch.float64).detach().T.contiguous())],
    )
    # only rows are normalized
    options = {
        **FULL_RANK,
        **({"normalize": None} if "normalize" in KINDS[kind][1] else {}),
    }
    a, b = make(kind, wide, **options), make(kind, tall, **options)
    for step in range(9):
        give_gradients(wide, step)
        tall[0].grad = wide[0].grad.T.contiguous()
        a.step()
        b.step()
    assert int(a.state[wide[0]]["step"]) == 9
    assert largest_difference([wide[0].T], tall) <= 1e-10


def test_an_expert_without_tokens_keeps_factors_and_basis() -> None:
    for kind in WITH_EXPERTS:
        p = parameter(3, 4, 4)
        optimizer = make(kind, [p], precondition_frequency=1)
        run(optimizer, [p], range(3))
        keys = [
            key
            for key in optimizer.state[p]
            if key.startswith(("factor", "basis", "eigenvalues", "root"))
        ]
        before = {key: optimizer.state[p][key].clone() for key in keys}
        give_gradients([p], 3)
        p.grad[1] = 0
        optimizer.step()
        for key, value in before.items():
            after = optimizer.state[p][key]
            assert same(after[1], value[1]), (kind, key)
            assert not torch.equal(after[0], value[0]), (kind, key)
        assert optimizer.counters["refreshes_skipped"] == (1 if kind == "soap_one_sided" else 2)


def test_an_expert_that_never_saw_a_token_is_left_alone() -> None:
    for kind in (*WITH_EXPERTS, "muon_per_expert", "lion_per_expert"):
        p = parameter(2, 4, 4)
        start = p.detach().clone()
        optimizer = make(kind, [p], precondition_frequency=1, weight_decay=0.0)
        for step in range(5):
            give_gradients([p], step)
            p.grad[0] = 0
            optimizer.step()
        assert same(p.detach()[0], start[0])
        if "basis_0" in optimizer.state[p]:
            assert torch.equal(optimizer.state[p]["basis_0"][0], torch.eye(4))
        if kind.startswith("kl"):
            assert torch.equal(optimizer.state[p]["eigenvalues_0"][0], torch.ones(4))


@pytest.mark.parametrize(
    ("dtype", "is_fused"), [(torch.float32, True), (torch.bfloat16, False)], ids=str
)
def test_the_rest_takes_torchs_fused_kernel_where_its_dtypes_allow(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_fused: bool
) -> None:
    taken: list[int] = []
    original = AdamWRule.step_whole

    def step_whole(self: AdamWRule, weights: list[torch.Tensor], *rest: Any) -> bool:
        done = original(self, weights, *rest)
        taken.extend([len(weights)] * done)
        return done

    monkeypatch.setattr(AdamWRule, "step_whole", step_whole)
    params = [parameter(7, dtype=dtype), parameter(5, dtype=dtype), parameter(4, 4, dtype=dtype)]
    run(SOAP(params), params, range(1))
    assert taken == ([2] if is_fused else [])


@pytest.mark.parametrize(
    "options",
    [
        {"precondition_frequency": 1},
        {"precondition_frequency": 3, "use_nesterov": True, "second_moment": "rotate"},
        {
            "precondition_frequency": 2,
            "statistics_of": "momentum",
            "sides": "smaller",
            "matrix_layout": "per_expert",
        },
        {
            "precondition_frequency": 2,
            "weight_decay": 0.3,
            "weight_decay_method": "l2",
            "orthogonalize": True,
        },
    ],
    ids=str,
)
def test_momentum_in_parameter_coordinates_is_the_one_in_the_bases_projected_out(
    options: dict[str, Any],
) -> None:
    ours, theirs = parameters(MATRICES, torch.float64), parameters(MATRICES, torch.float64)
    own = SOAP(ours, momentum_in="parameter", **FULL_RANK, **options)
    turned = SOAP(theirs, **FULL_RANK, **options)
    run_both((own, ours), (turned, theirs), range(12))
    assert largest_difference(ours, theirs) <= 1e-10
    state = turned.state[theirs[0]]
    m = state["basis_0"] @ state["exp_avg"] if "basis_0" in state else state["exp_avg"]
    assert torch.allclose(
        own.state[ours[0]]["momentum_buffer"], m @ state["basis_1"].mT, rtol=0, atol=1e-10
    )
    with pytest.raises(ValueError, match="exp_avg missing"):
        SOAP(theirs, **FULL_RANK, **options).load_state_dict(
            {
                "state": own.state_dict()["state"],
                "param_groups": turned.state_dict()["param_groups"],
            }
        )


def test_embedding_soap_is_soap_with_one_side_renewed_at_every_step() -> None:
    """The bits are equal on an embedding, its transpose and a vector; with other defaults they are
    not."""
    options = {
        "betas": (0.9, 0.95),
        "sides": "smaller",
        "precondition_frequency": 1,
        "second_moment": "rotate",
    }
    ours = parameters([(40, 6), (6, 40), (6,)])
    theirs, others = clones(ours), clones(ours)
    run_both(
        (EmbeddingSOAP(ours, lr=1e-2), ours), (SOAP(theirs, lr=1e-2, **options), theirs), range(8)
    )
    run(SOAP(others, lr=1e-2), others, range(8))
    assert largest_difference(ours, theirs) == 0
    assert largest_difference(ours, others) > 1e-4
    state = EmbeddingSOAP(parameters([(40, 6)]), lr=1e-2)
    state.param_groups[0]["params"][0].grad = torch.ones(40, 6)
    state.step()
    assert {
        key: tuple(x.shape)
        for key, x in next(iter(state.state.values())).items()
        if key.startswith("basis")
    } == {"basis_1": (6, 6)}
