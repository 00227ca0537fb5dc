"""One optimizer step: the gradient is that of the whole batch, it is clipped, and a gradient that
is not finite changes nothing."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.config.config import Config, MoEConfig
from lather.config.optim import optim_config
from lather.data.batches import Batch
from lather.data.sequences import IGNORE_INDEX
from lather.engine.engine import build_engine, build_model
from lather.engine.optimizer import build_optimizer
from lather.engine.step import Rates, TrainStep, learning_rates, pick_device
from lather.errors import ConfigError
from lather.models.decoder import Decoder
from lather.optim import SOAP, MatrixOptimizer
from lather.optim.rules import RULES
from lather.parallel.mesh import Mesh
from lather.pipeline.timeline import TimelineRecorder
from train.tiny_steps import CPU, gradients_of_step, state_bits, train_step

MakeModel = Callable[..., Decoder]
Tokens = Callable[..., Tensor]


def optimizer_of(model: Decoder, name: str = "soap") -> MatrixOptimizer:
    options = {"precondition_frequency": 2} if name == "soap" else {}
    return build_optimizer(optim_config(name, **options), model.named_parameters())


# --- gradients ------------------------------------------------------------------------------------


def ragged(tokens_BS: Tensor) -> Tensor:
    """Leave out the last label of two of four sequences; labels are also inputs, so that only the
    last one can be left out."""
    tokens_BS[1:3, -1] = IGNORE_INDEX
    return tokens_BS


@pytest.mark.parametrize("length", [2, 3, 17])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_micro_batches_give_the_gradient_of_the_whole_batch(
    make_model: MakeModel, tokens: Tokens, micro_batch_size: int, length: int
) -> None:
    """With sequences of two tokens, four micro-batches have 1 + 0 + 0 + 1 labels."""
    model, batch = make_model(dtype=torch.float64), ragged(tokens(0, 4, length))
    whole, expected = gradients_of_step(model, batch)
    parts, result = gradients_of_step(model, batch, micro_batch_size=micro_batch_size)
    # with one key those of queries and keys are rounding
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-12, atol=1e-12 * largest)
    assert result.tokens == expected.tokens == 4 * (length - 1) - 2
    assert result.counts_LE.equal(expected.counts_LE)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)


def test_the_gradient_is_that_of_cross_entropy_and_balance_by_hand(
    make_model: MakeModel, tokens: Tokens
) -> None:
    """Two micro-batches have 4 of 4 and 3 of 4 labels; the balance loss is each micro-batch's own,
    weighted with its tokens."""
    model, batch, coefficient = make_model(dtype=torch.float64), tokens(0, 4, 3), 0.5
    batch[3, -1] = IGNORE_INDEX
    gradients, result = gradients_of_step(
        model, batch, MoEConfig(balance_coefficient=coefficient), micro_batch_size=2
    )
    total, balance = torch.zeros((), dtype=torch.float64), 0.0
    for part in batch.split(2):
        output = model(part[:, :-1])
        log_p = output.logits_BSV.log_softmax(-1)
        learned = part[:, 1:] != IGNORE_INDEX
        picked = log_p.gather(-1, part[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        total = total - picked[learned].sum() / 7 + coefficient / 2 * output.balance_loss()
        balance += output.balance_loss().item() / 2
    model.zero_grad()
    total.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-10, atol=1e-12)
    assert result.tokens == 7
    assert result.balance_loss == pytest.approx(balance, rel=1e-6)  # there is one MoE block
    assert result.loss == pytest.approx(total.item() - coefficient * balance, rel=1e-6)
    assert result.grad_norm == pytest.approx(
        math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters())), rel=1e-10
    )
    assert result.counts_LE.shape == (1, 4)
    assert result.counts_LE.sum() == 4 * 2 * 2  # sequences, positions, experts per token


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3, 0.1, 1e6])
def test_clipping_bounds_the_norm_that_the_optimizer_sees(
    make_model: MakeModel, tokens: Tokens, max_grad_norm: float
) -> None:
    free, unclipped = gradients_of_step(make_model(dtype=torch.float64), tokens(0))
    gradients, result = gradients_of_step(
        make_model(dtype=torch.float64), tokens(0), max_grad_norm=max_grad_norm
    )
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    assert result.grad_norm == unclipped.grad_norm > 0.2
    expected = min(max_grad_norm, result.grad_norm) if max_grad_norm else result.grad_norm
    assert norm == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, free[name] * (norm / result.grad_norm))


# --- not finite -----------------------------------------------------------------------------------


@contextmanager
def loss_times(model: Decoder, value: float) -> Iterator[None]:
    handle = model.norm.register_forward_hook(lambda module, arguments, output: output * value)
    yield
    handle.remove()


@contextmanager
def one_gradient(model: Decoder, value: float) -> Iterator[None]:
    """Set one gradient to `value`; the loss stays finite."""
    handle = model.get_parameter("layers.1.input_layernorm.weight").register_hook(
        lambda g: g.index_fill(0, torch.tensor([1]), value)
    )
    yield
    handle.remove()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("spoiled", [loss_times, one_gradient])
@pytest.mark.parametrize("name", ["soap", "adamw"])
def test_what_is_not_finite_changes_nothing(
    make_model: MakeModel,
    tokens: Tokens,
    name: str,
    spoiled: Callable[..., AbstractContextManager[None]],
    value: float,
) -> None:
    model, untouched = make_model(), make_model()
    step = train_step(model, optimizer_of(model, name), max_grad_norm=1.0)
    reference = train_step(untouched, optimizer_of(untouched, name), max_grad_norm=1.0)
    for number in (1, 2):
        assert not step(Batch.of_tokens(tokens(number)), 1e-2).skipped
        reference(Batch.of_tokens(tokens(number)), 1e-2)
    before = state_bits(model, step.optimizer)
    with spoiled(model, value):
        result = step(Batch.of_tokens(tokens(9)), 5e-2)
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert math.isfinite(result.loss) == (spoiled is one_gradient)
    assert (result.refreshes_done, result.refreshes_skipped) == (0, 0)
    assert state_bits(model, step.optimizer) == before
    assert all(p.grad is None for p in model.parameters())
    assert not step(Batch.of_tokens(tokens(3)), 1e-2).skipped
    reference(Batch.of_tokens(tokens(3)), 1e-2)
    assert state_bits(model, step.optimizer) == state_bits(untouched, reference.optimizer)


# --- validation and precision ---------------------------------------------------------------------


def test_validation_loss_is_the_cross_entropy_by_hand(
    make_model: MakeModel, tokens: Tokens
) -> None:
    model, batch = make_model(dtype=torch.float64), tokens(0, 5)
    step = train_step(model, optimizer_of(model), micro_batch_size=2)
    logits_BSV = model(batch[:, :-1]).logits_BSV
    expected = F.cross_entropy(logits_BSV.flatten(0, 1), batch[:, 1:].flatten()).item()
    assert step.engine.validation_loss(Batch.of_tokens(batch)) == pytest.approx(expected, rel=1e-12)
    assert all(p.grad is None for p in model.parameters())


def test_bf16_multiplies_in_bf16_and_keeps_weights_and_state_in_fp32(
    make_model: MakeModel, tokens: Tokens
) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        model = make_model()
        step = train_step(model, optimizer_of(model), precision=precision)
        losses[precision] = [step(Batch.of_tokens(tokens(n)), 1e-2).loss for n in (1, 2, 3)]
        losses[precision].append(step.engine.validation_loss(Batch.of_tokens(tokens(4))))
        state = [value for state in step.optimizer.state.values() for value in state.values()]
        assert {x.dtype for x in (*model.parameters(), *state)} == {torch.float32}
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["bf16"][0] != losses["fp32"][0]


def test_fp64_is_the_whole_models(make_config: Callable[..., Config]) -> None:
    config = make_config(train={"precision": "fp64"})
    engine = build_engine(config, Mesh.single(CPU))
    optimizer = build_optimizer(config.optim, engine.parameters)
    batch = torch.randint(config.model.vocab_size, (4, config.train.sequence_length + 1))
    assert not TrainStep(engine, optimizer, 1.0)(Batch.of_tokens(batch), 1e-2).skipped
    assert {p.dtype for p in engine.part.parameters()} == {torch.float64}
    assert {p.dtype for p in build_model(config, CPU).parameters()} == {torch.float64}


# --- optimizers -----------------------------------------------------------------------------------


def test_the_groups_of_soap(make_model: MakeModel) -> None:
    model = make_model()
    optimizer = optimizer_of(model)
    assert isinstance(optimizer, SOAP)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    group_of = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    rest = {"embed_tokens.weight", "layers.1.mlp.gate.weight", *(n for n in names if "norm" in n)}
    experts = {"layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"}
    for name, group in group_of.items():
        rule, betas = ("adamw", (0.9, 0.95)) if name in rest else ("soap", (0.95, 0.95))
        assert (group["rule"], group["betas"]) == (rule, betas)
        assert (group["matrix_layout"] == "per_expert") == (name in experts)
        assert group["nonfinite"] == "ignore"


def test_the_options_of_the_configuration_reach_the_optimizer(make_model: MakeModel) -> None:
    """The trainer decides about layouts; a section of a kind that gives an option has its own."""
    options = {"lr": 0.5, "eps": 1e-4, "weight_decay": 0.3, "precondition_frequency": 7}
    sections = {"experts": {"betas": (0.5, 0.6)}, "rest": {"lr": 0.25, "eps": 1e-5}}
    config = optim_config("soap", **options, second_moment="permute", **sections)
    optimizer = build_optimizer(config, make_model().named_parameters())
    groups = {group["param_names"][0].split(".")[-2]: group for group in optimizer.param_groups}
    matrix = {**options, "second_moment": "permute", "sides": "auto", "lr_factor": 1.0}
    rest = {"rule": "adamw", "lr": 0.25, "lr_factor": 0.5, "eps": 1e-5, "weight_decay": 0.3}
    for name, expected in {
        "experts": {**matrix, "betas": (0.5, 0.6)},
        "q_proj": {**matrix, "betas": (0.95, 0.95)},
        "embed_tokens": rest,
        "gate": rest,
    }.items():
        assert {key: groups[name][key] for key in expected} == expected


def test_all_groups_follow_one_schedule_or_that_of_their_kind(
    make_model: MakeModel, tokens: Tokens
) -> None:
    """The router's rate is its own, and its schedule that of the rest."""
    rest = {"lr_factor": 3.0, "warmup_steps": 0, "schedule": "1-sqrt", "min_lr_ratio": 0.0}
    config = optim_config(
        "muon", lr=0.02, experts={"lr": 0.03}, warmup_steps=2, rest=rest, router={"lr": 0.01}
    )
    model = make_model()
    step = train_step(model, build_optimizer(config, model.named_parameters()))

    def rates_of(lr: Rates) -> dict[str, float]:
        step(Batch.of_tokens(tokens(0)), lr)
        groups = step.optimizer.param_groups
        return {group["param_names"][0].split(".")[-2]: group["lr"] for group in groups}

    peaks = {"q_proj": 0.02, "experts": 0.03, "embed_tokens": 0.06, "gate": 0.01}
    for share in (1.0, 0.5, 0.0):
        expected = {name: share * lr for name, lr in peaks.items()}
        assert rates_of(0.02 * share) == pytest.approx(expected)
    shares = {1: (0.5, 1.0), 9: (1.0, 1 - math.sqrt(0.5)), 10: (0.1, 0.0)}
    config = replace(config, schedule="constant", rest=replace(config.rest, decay_fraction=0.2))
    for number, (of_matrices, of_rest) in shares.items():
        ends = replace(config, schedule="linear") if number == 10 else config
        found = rates_of(learning_rates(number, ends, 10))
        assert found == pytest.approx(
            {
                name: (of_matrices if name in ("q_proj", "experts") else of_rest) * lr
                for name, lr in peaks.items()
            }
        )


@pytest.mark.parametrize("name", RULES)
def test_the_optimizer_has_the_rule_and_the_layout_of_its_experts(
    make_model: MakeModel, name: str
) -> None:
    optimizer = optimizer_of(make_model(), name)
    assert optimizer.rule is RULES[name]
    layouts = [group["matrix_layout"] for group in optimizer.param_groups]
    expected = "stacked" if name == "stacked_soap" else "per_expert"
    assert [layout for layout in layouts if layout != "tensor"] == [expected]


@pytest.mark.parametrize("name", RULES)
def test_elementwise_state_of_parameters_in_fp64_is_in_fp64(
    make_model: MakeModel, tokens: Tokens, name: str
) -> None:
    model = make_model(dtype=torch.float64)
    step = train_step(model, optimizer_of(model, name))
    step(Batch.of_tokens(tokens(0)), 1e-3)
    for group in step.optimizer.param_groups:
        states = [step.optimizer.state[p].items() for p in group["params"]]
        dtypes = {value.dtype for state in states for key, value in state if key != "step"}
        assert dtypes == {torch.float64 if group["rule"] == "adamw" else torch.float32}


def test_soap_is_adamw_on_embeddings_and_norms(make_model: MakeModel) -> None:
    """Both get the same gradients; a matrix shows that the comparison can tell the two apart."""
    ours, plain = make_model(), make_model()
    config = optim_config("soap", lr=1e-2, precondition_frequency=1, rest={"lr_factor": 1.0})
    optimizers = [
        build_optimizer(config, ours.named_parameters()),
        torch.optim.AdamW(plain.parameters(), 1e-2, (0.9, 0.95), 1e-8, 0.01),
    ]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    pairs = {name: (p, plain.get_parameter(name)) for name, p in ours.named_parameters()}
    for name in ("embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"):
        torch.testing.assert_close(*pairs[name], rtol=1e-5, atol=1e-6)
    matrix, other = pairs["layers.0.self_attn.o_proj.weight"]
    assert (matrix - other).abs().max() > 1e-3


def test_adamw_is_torchs_adamw_in_a_plain_loop(make_model: MakeModel, tokens: Tokens) -> None:
    model, plain = make_model(), make_model()
    options = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    config = optim_config("adamw", **options, rest={"lr_factor": 1.0})
    step = train_step(model, build_optimizer(config, model.named_parameters()), max_grad_norm=0.5)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1.0, **options)
    for number, lr in ((1, 1e-3), (2, 1e-2), (3, 5e-3)):
        step(Batch.of_tokens(tokens(number)), lr)
        batch = tokens(number)
        logits_BSV = plain(batch[:, :-1]).logits_BSV
        F.cross_entropy(logits_BSV.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        adamw.zero_grad()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, plain.get_parameter(name), rtol=1e-5, atol=1e-6)


def test_a_rate_of_zero_moves_nothing_and_refreshes_are_counted(
    make_model: MakeModel, tokens: Tokens
) -> None:
    model, fresh = make_model(), make_model()
    step = train_step(model, optimizer_of(model))
    results = [step(Batch.of_tokens(tokens(number)), 0.0) for number in (1, 2, 3, 4)]
    assert all(p.equal(q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))
    # first bases, then every second step
    assert [result.refreshes_done > 0 for result in results] == [True, True, False, True]
    assert all(result.optimizer_seconds > 0 for result in results)
    assert all(p.grad is None for p in model.parameters())


def test_a_device_that_is_not_there_names_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"train\.device = 'cuda', but .*: use 'auto' or 'cpu'"):
        pick_device("cuda")


def test_refreshes_beside_the_forward_are_counted_once_whoever_waits_for_them(
    make_model: MakeModel, tokens: Tokens
) -> None:
    model = make_model()
    optimizer = build_optimizer(
        optim_config("soap", precondition_frequency=2, async_refresh=True), model.named_parameters()
    )
    assert isinstance(optimizer, SOAP)
    step, counts = train_step(model, optimizer), []
    for number in range(6):
        counts.append(step(Batch.of_tokens(tokens(number)), 1e-3).refreshes_done)
        assert sum(counts) == optimizer.counters["refreshes_done"]
        optimizer.state_dict()  # as a checkpoint does: work under way is finished and counted
    assert [count > 0 for count in counts] == [False, True, True, False, True, False]


def test_one_rank_waits_for_nothing_and_records_each_action_once(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lather.pipeline.timeline.SHORTEST_WAIT", 0.0)  # as if the host were slow
    config = make_config(parallel={"schedule": "dualpipev"}, train={"micro_batch_size": 1})
    recorder = TimelineRecorder(CPU)
    engine = build_engine(config, Mesh.single(CPU), record=recorder)
    step = TrainStep(engine, build_optimizer(config.optim, engine.parameters), 1.0)
    batch = torch.randint(config.model.vocab_size, (4, config.train.sequence_length + 1))
    recorder.begin()
    step(Batch.of_tokens(batch), 1e-2)
    actions = [event.action for event in recorder.end()]
    assert actions == list(engine.schedule.ranks[0])


@pytest.mark.parametrize("settings", [{}, {"gradient_dtype": "bfloat16"}], ids=str)
def test_weights_that_nobody_gathers_are_installed_on_a_gpu_too(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    """There the passes wait for units that were gathered ahead."""
    config = make_config(train={"precision": "bf16", **settings})
    batch = torch.randint(config.model.vocab_size, (4, config.train.sequence_length + 1))
    norms = []
    for is_ahead in (False, True):
        monkeypatch.setattr("lather.pipeline.executor.is_gpu", lambda _, ahead=is_ahead: ahead)
        engine = build_engine(config, Mesh.single(CPU))
        optimizer = build_optimizer(config.optim, engine.parameters)
        norms.append(TrainStep(engine, optimizer, 1.0)(Batch.of_tokens(batch), 1e-2).grad_norm)
    assert norms[0] == norms[1] > 0
