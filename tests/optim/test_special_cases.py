"""Special cases in which the family is another optimizer, or one member of the family is another
member."""

from typing import Any

import pytest
import torch
from optim_helpers import (
    FULL_RANK,
    KINDS,
    MATRICES,
    SHAPES,
    SOAP_KINDS,
    WITH_EXPERTS,
    clones,
    give_gradients,
    largest_difference,
    make,
    run_both,
    run_of,
    same,
)
from torch import Tensor, nn

from lather.optim import KLSOAP, SOAP, AdamW, EmbeddingSOAP, StackedSOAP
from lather.optim.rules.adamw import AdamWRule

FP64 = {"dtype": torch.float64, "state_dtype": torch.float64}


@pytest.mark.parametrize(
    "identity_basis",
    [{"max_precond_dim": 0}, {"adam_warmup_steps": 100}],
    ids=["no_factor", "warm_up"],
)
@pytest.mark.parametrize("kind", [*(k for k in SOAP_KINDS if "orthogonal" not in k), "adamw"])
def test_identity_basis_equals_adamw(kind: str, identity_basis: dict[str, Any]) -> None:
    if kind == "adamw":
        identity_basis = {}
    settings = {"betas": (0.9, 0.97), "eps": 1e-6, "weight_decay": 0.1}
    a = run_of(kind, SHAPES, **FP64, **settings, **identity_basis)
    b = run_of(torch.optim.AdamW, SHAPES, torch.float64, **settings)
    wrong = run_of(torch.optim.AdamW, SHAPES, torch.float64, **settings, lr=1.01e-2)
    run_both(a, b, range(8))
    wrong.steps(range(8))
    assert largest_difference(a.params, b.params) <= 1e-14
    assert largest_difference(a.params, wrong.params) > 1e-4


@pytest.mark.parametrize("shape", [(3, 8, 4), (3, 4, 8), (3, 5, 5)], ids=str)
def test_stacked_soap_is_kl_soap_on_the_merged_matrix(shape: tuple[int, int, int]) -> None:
    b, m, n = shape

    def merged(x: Tensor) -> Tensor:
        return x.movedim(0, 1).reshape(m, b * n) if n <= m else x.reshape(b * m, n)

    a = run_of(StackedSOAP, [shape], **FP64)
    q = nn.Parameter(merged(a.params[0].detach()).clone())
    plain = KLSOAP([q], 1e-2, state_dtype=torch.float64)
    for step in range(6):
        a.steps([step])
        q.grad = merged(a.params[0].grad).clone()
        plain.step()
    assert same(merged(a.params[0].detach()), q.detach())


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
    options: dict[str, Any] = {"precondition_frequency": 2, "adam_warmup_steps": 3}
    options |= {"second_moment": "rotate"} if "soap" in kind else {}
    a = run_of(kind, [shape], **options)
    alone = clones(a.params[0].detach().unbind())
    single = make(kind, alone, **options)
    for step in range(9):
        a.steps([step])
        for p, g in zip(alone, a.params[0].grad, strict=True):
            p.grad = g.clone()
        single.step()
    assert largest_difference(alone, a.params[0].unbind()) <= tolerance


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "per_head" not in kind])
def test_a_wide_matrix_is_its_transposed_tall_one(kind: str) -> None:
    # only rows are normalized, and a tall matrix has a larger spectral scale
    options = {**FULL_RANK, **({"normalize": None} if "normalize" in KINDS[kind][1] else {})}
    options |= {"scale": 1.0} if kind == "scion" else {}
    a = run_of(kind, [(5, 8)], torch.float64, **options)
    tall = [nn.Parameter(a.params[0].detach().T.contiguous())]
    b = make(kind, tall, **options)
    for step in range(9):
        a.steps([step])
        tall[0].grad = a.params[0].grad.T.contiguous()
        b.step()
    assert int(a.state(0)["step"]) == 9
    assert largest_difference([a.params[0].T], tall) <= 1e-10


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_an_expert_without_tokens_keeps_factors_and_basis(kind: str) -> None:
    a = run_of(kind, [(3, 4, 4)], precondition_frequency=1)
    a.steps(range(3))
    kept = ("factor", "basis", "eigenvalues", "root")
    before = {name: x.clone() for name, x in a.state(0).items() if name.startswith(kept)}
    give_gradients(a.params, 3)
    a.params[0].grad[1] = 0
    a.optimizer.step()
    for name, x in before.items():
        assert same(a.state(0)[name][1], x[1]), name
        assert not torch.equal(a.state(0)[name][0], x[0]), name
    one_sided = {"soap_one_sided": 1, "grafted_shampoo_per_expert": 1}
    skipped = {**one_sided, "psgd_kron_per_expert": 0}.get(kind, 2)
    assert a.optimizer.counters["refreshes_skipped"] == skipped


@pytest.mark.parametrize("kind", [*WITH_EXPERTS, "muon_per_expert", "lion_per_expert"])
def test_an_expert_that_never_saw_a_token_is_left_alone(kind: str) -> None:
    a = run_of(kind, [(2, 4, 4)], precondition_frequency=1, weight_decay=0.0)
    start = a.params[0].detach().clone()
    for step in range(5):
        give_gradients(a.params, step)
        a.params[0].grad[0] = 0
        a.optimizer.step()
    assert same(a.params[0].detach()[0], start[0])
    state = a.state(0)
    assert "basis_0" not in state or torch.equal(state["basis_0"][0], torch.eye(4))
    assert "eigenvalues_0" not in state or torch.equal(state["eigenvalues_0"][0], torch.ones(4))


@pytest.mark.parametrize(
    ("dtype", "is_fused"), [(torch.float32, True), (torch.bfloat16, False)], ids=str
)
def test_the_rest_takes_torchs_fused_kernel_where_its_dtypes_allow(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_fused: bool
) -> None:
    taken: list[int] = []
    original = AdamWRule.step_whole

    def step_whole(self: AdamWRule, weights: list[Tensor], *rest: Any) -> bool:
        done = original(self, weights, *rest)
        taken.extend([len(weights)] * done)
        return done

    monkeypatch.setattr(AdamWRule, "step_whole", step_whole)
    run_of(SOAP, [(7,), (5,), (4, 4)], dtype).steps(range(1))
    assert taken == ([2] if is_fused else [])


def test_adamw_gives_the_same_bits_wherever_a_vector_is_cut() -> None:
    """Without care torch's kernel gives other bits to one element in a hundred here."""
    torch.manual_seed(5)
    lengths = [*range(1, 90), 1023, 1024, 1025, 1040, 2500]
    whole = nn.Parameter(torch.randn(sum(lengths)))
    pieces = [nn.Parameter(piece.clone()) for piece in whole.detach().split(lengths)]
    optimizers = AdamW([whole], 1e-2), AdamW(pieces, 1e-2)
    for _ in range(10):
        whole.grad = torch.randn_like(whole)
        for piece, grad in zip(pieces, whole.grad.split(lengths), strict=True):
            piece.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat([piece.detach() for piece in pieces]), whole)


@pytest.mark.parametrize("size", [3, 16, 21])
def test_vectors_of_any_length_have_adams_moments_and_weights(size: int) -> None:
    """On a CPU the last elements, which fill no vector register, are updated apart."""
    a = run_of(AdamW, [(size,), (16,), (5, 5)], betas=(0.9, 0.95))
    b = run_of(torch.optim.AdamW, [(size,), (16,), (5, 5)], betas=(0.9, 0.95))
    run_both(a, b, range(4))
    assert largest_difference(a.params, b.params) <= 1e-6
    for i in range(3):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(a.state(i)[name], b.state(i)[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"precondition_frequency": 1},
        {"precondition_frequency": 3, "use_nesterov": True, "second_moment": "rotate"},
        {"statistics_of": "momentum", "sides": "smaller", "matrix_layout": "per_expert"},
        {"weight_decay": 0.3, "weight_decay_method": "l2", "orthogonalize": True},
    ],
    ids=str,
)
def test_momentum_in_parameter_coordinates_is_the_one_in_the_bases_projected_out(
    options: dict[str, Any],
) -> None:
    options = {**FULL_RANK, "precondition_frequency": 2, **options}
    a = run_of(SOAP, MATRICES, torch.float64, momentum_in="parameter", **options)
    b = run_of(SOAP, MATRICES, torch.float64, **options)
    run_both(a, b, range(12))
    assert largest_difference(a.params, b.params) <= 1e-10
    s = b.state(0)
    m = s["basis_0"] @ s["exp_avg"] if "basis_0" in s else s["exp_avg"]
    m, found = m @ s["basis_1"].mT, a.state(0)["momentum_buffer"]
    torch.testing.assert_close(found, m, rtol=0, atol=1e-10)


def test_embedding_soap_is_soap_with_one_side_renewed_at_every_step() -> None:
    """The bits are equal on an embedding, its transpose and a vector; with other defaults they are
    not."""
    options = {"betas": (0.9, 0.95), "sides": "smaller", "precondition_frequency": 1}
    shapes = [(40, 6), (6, 40), (6,)]
    a, other = run_of(EmbeddingSOAP, shapes), run_of(SOAP, shapes)
    b = run_of(SOAP, shapes, second_moment="rotate", **options)
    run_both(a, b, range(8))
    other.steps(range(8))
    assert largest_difference(a.params, b.params) == 0
    assert largest_difference(a.params, other.params) > 1e-4
    bases = {name: x.shape for name, x in a.state(0).items() if name.startswith("basis")}
    assert bases == {"basis_1": (6, 6)}
