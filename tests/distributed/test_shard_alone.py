"""Sharding in one process is complete, and only fills in gradients of zero."""

from __future__ import annotations

import pytest
import torch
from shard_cases import HIDDEN, Case, Part, gather, grad_norm, reduce, tokens_of, whole_model
from torch import nn

from lather.models.decoder import Decoder
from lather.parallel.fsdp_units import check_dtypes, shard
from lather.parallel.local_parameters import clip_, local_parameters
from lather.parallel.mesh import Mesh

CPU = torch.device("cpu")


class TestOneProcess:
    """Sharding in one process is complete, and only fills in gradients of zero."""

    case = Case(tied=True)

    def part(self) -> tuple[Decoder, Part, Mesh]:
        mesh = Mesh.single(CPU)
        decoder = whole_model(self.case)
        return decoder, Part(decoder, self.case, mesh), mesh

    def test_parameters_stay_what_they_are(self) -> None:
        decoder, part, mesh = self.part()
        before = dict(part.named_parameters())
        stages = shard(part, mesh)
        local = local_parameters(part, mesh)
        rows = {one.info.name: one.parameter for one in local}
        gather(stages, async_op=True)
        assert all(p is before[name] and p is rows[name] for name, p in part.named_parameters())
        tokens, labels = tokens_of(0, 0, 0)
        loss = decoder(tokens, labels).loss
        assert loss is not None
        loss.backward()
        decoder.norm.weight.grad = None
        grads = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        reduce(stages)
        local.collect_gradients()
        assert all(p.grad is grads[name] for name, p in rows.items() if name != "norm.weight")
        assert torch.equal(rows["norm.weight"].grad, torch.zeros(HIDDEN, dtype=torch.float64))
        all_grads = [p.grad for p in part.parameters()]
        expected = torch.nn.utils.get_total_norm(all_grads)
        norm = grad_norm(local, mesh)
        torch.testing.assert_close(norm, expected)
        copies = [nn.Parameter(torch.zeros_like(grad)) for grad in all_grads]
        for max_norm in (0.7 * norm.item(), 2 * norm.item()):
            for copy, grad in zip(copies, all_grads, strict=True):
                copy.grad = grad.clone()
            torch.nn.utils.clip_grads_with_norm_(copies, max_norm, norm)
            clip_(local.gradients(), norm, max_norm)
            assert all(
                torch.equal(copy.grad, grad) for copy, grad in zip(copies, all_grads, strict=True)
            )
        local.clear_gradients()
        assert all(p.grad is None for p in part.parameters())

    def test_what_is_not_gathered_cannot_be_reduced(self) -> None:
        _, part, mesh = self.part()
        for unit in shard(part, mesh)[0]:
            with pytest.raises(AssertionError, match="call it before reshard"):
                unit.reduce_gradients()
            for _ in range(unit.users):
                unit.unshard()
            for _ in range(unit.users - 1):
                unit.reduce_gradients()
                unit.reshard()
            unit.reshard()
            with pytest.raises(AssertionError, match="call it before reshard"):
                unit.reduce_gradients()

    @pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
    def test_a_clip_to_nothing_is_refused(self, max_norm: float) -> None:
        with pytest.raises(ValueError, match=r"max_norm=.* number > 0"):
            clip_([torch.ones(3)], torch.tensor(2.0), max_norm)

    def test_narrow_or_mixed_parameters_are_refused(self) -> None:
        decoder, part, _ = self.part()
        decoder.norm.float()
        with pytest.raises(TypeError, match=r"dtypes .*float32.*float64"):
            check_dtypes(part)
        part.to(torch.bfloat16)
        with pytest.raises(TypeError, match=r"bfloat16.*keep fp32 parameters"):
            check_dtypes(part)
