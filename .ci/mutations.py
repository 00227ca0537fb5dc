"""Finds out whether the tests notice deliberate errors: puts each into a copy of the checkout and
runs the tests there that have to fail.

    python .ci/mutations.py [NAME ...]        tries the errors whose names begin with a NAME (or
                                              all); exit status 1 if one was missed

An error changes one line, as a slip of the hand would: a sign, an off-by-one, a lost cast, a wrong
key. It is caught if a test fails. A file that cannot be collected, a crash or a timeout does not
count, because any test would notice it. Takes ten minutes on two cores."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1200


class Mutation(NamedTuple):
    """A deliberate error, and the tests that have to catch it."""

    name: str
    file: str
    """The file's path below src/lather."""
    old: str
    """The text that is replaced; it occurs once in the file."""
    new: str
    tests: str
    """Paths of the tests below tests, separated by spaces."""


MUTATIONS = (
    Mutation(
        "factors: the bias correction of one step too early",
        "optim/linalg/kronecker.py",
        "beta ** (step + 1)",
        "beta ** step",
        "optim/test_reference.py",
    ),
    Mutation(
        "bases: vectors along which there is only rounding are kept",
        "optim/linalg/kronecker.py",
        "q.masked_fill(rounded[dim][:, None], 0.0)",
        "q",
        "optim/test_rounding.py",
    ),
    Mutation(
        "remainders: a negative one borrows nothing",
        "kernels/remainder/reference.py",
        "(bits + 2**15).bitwise_right_shift_(16)",
        "bits.bitwise_right_shift(16)",
        "kernels/test_remainder.py",
    ),
    Mutation(
        "rounding: the exact weight loses its remainder before l2 decay",
        "optim/batched/plan.py",
        "weights[i] = join(weights[i], r)",
        "weights[i] = weights[i].float()",
        "optim/test_weight_rounding.py",
    ),
    Mutation(
        "state in 8 bits: an owner has scales of another region",
        "optim/batched/matrix_layout.py",
        "offset, size = box.offset[-1] // BLOCK, num_blocks(box.size[-1])",
        "offset, size = 0, num_blocks(box.size[-1])",
        "distributed/test_coded_state.py",
    ),
    Mutation(
        "clipping: a matrix that its rank gathers whole is not clipped by its rule",
        "optim/batched/optimizer.py",
        "count_step(chunks, idle, factor)",
        "count_step(chunks, idle, 1.0)",
        "distributed/test_sharded_optimizer.py",
    ),
    Mutation(
        "clipping: the kernel of Muon multiplies coupled weight decay, too",
        "optim/rules/muon.py",
        "is_read_once = self._is_one_momentum and not self.couples_decay",
        "is_read_once = self._is_one_momentum",
        "optim/test_gradient_factor.py",
    ),
    Mutation(
        "muon: Nesterov with the weights exchanged",
        "kernels/momentum/reference.py",
        "(g, 1 - mu), mu)",
        "(g, 1 - mu), 1 - mu)",
        "optim/test_muon.py",
    ),
    Mutation(
        "kernels: tiles above the diagonal are not transposed",
        "kernels/symmetric_product/triton.py",
        "tl.store(out_ptr + first + at, tl.trans(y), mask=inside)",
        "tl.store(out_ptr + first + at, y, mask=inside)",
        "kernels/test_symmetric_product.py",
    ),
    Mutation(
        "kernels: squares of parts of other sizes are added",
        "kernels/unit_norm/triton.py",
        "parts * square(sizes / size)",
        "parts",
        "kernels/test_unit_norm.py",
    ),
    Mutation(
        "kernels: the second part of a matrix is that of the sum",
        "kernels/split_parts/triton.py",
        "(x - hi.to(tl.float32))",
        "(x + hi.to(tl.float32))",
        "kernels/test_split_parts.py",
    ),
    Mutation(
        "refreshes: second moments are multiplied by S",
        "optim/linalg/eigenbasis.py",
        "squares = turn.square()",
        "squares = turn",
        "optim/test_split_products.py",
    ),
    Mutation(
        "kernels: the gradient of a shared key leaves out most heads",
        "kernels/rotary/triton.py",
        "first += tl.load(from_shared + both[None, :], mask=inside, other=0.0).to(WIDE)",
        "first = tl.load(from_shared + both[None, :], mask=inside, other=0.0).to(WIDE)",
        "kernels/test_rotary_parts.py",
    ),
    Mutation(
        "sharded: updates reach the first of several copies",
        "optim/sharded/exchange.py",
        "[(unit.owner, position) for position in positions]",
        "[(unit.owner, position) for position in positions[:1]]",
        "distributed/test_sharded_optimizer.py",
    ),
    Mutation(
        "sharded: strided shards cut in the order of plain ones",
        "optim/sharded/placement.py",
        "order = [*(shard for shard in shards if shard not in strided), *reversed(strided)]",
        "order = shards",
        "distributed/test_sharded_optimizer.py",
    ),
    Mutation(
        "optimizer: flat pieces of FSDP1 pass for vectors",
        "optim/batched/flat.py",
        "    if is_flattened(p) and p.dim() < 2:",
        "    if not p.dim():",
        "distributed/test_flat_parameters.py",
    ),
    Mutation(
        "optimizer: functions have no key in a state dict",
        "optim/batched/stateful.py",
        'groups = [saveable(group) for group in saved["param_groups"]]',
        "groups = [saveable({k: x for k, x in group.items() if not callable(x)}) for group in "
        'saved["param_groups"]]',
        "distributed/test_flattened_state.py",
    ),
    Mutation(
        "optimizer: a state dict that does not wait for refreshes",
        "optim/batched/stateful.py",
        "        self._finish_state()\n        if self._groups.sharding.has_shares",
        "        if self._groups.sharding.has_shares",
        "optim/test_async_refresh.py",
    ),
    Mutation(
        "units: a second reduction of a step replaces the first",
        "parallel/sharded_parameters.py",
        "self._sum = total if self._sum is None else self._sum.add_(total)",
        "self._sum = total",
        "distributed/test_sharded_parameters.py",
    ),
    Mutation(
        "units: the computation does not wait for a gather",
        "parallel/sharded_parameters.py",
        "        self.streams.gathers.wait(event)\n",
        "",
        "distributed/test_sharded_parameters.py",
    ),
    Mutation(
        "units: a gather counts as a new version of a parameter",
        "parallel/sharded_parameters.py",
        "memory = padded.data.view(",
        "memory = padded.detach().view(",
        "distributed/test_sharded_parameters.py",
    ),
    Mutation(
        "offload: rows are written back before their step is done",
        "optim/batched/visits.py",
        "            self._writing.wait_event(done)\n",
        "",
        "optim/test_offload.py",
    ),
    Mutation(
        "offload: bases are written back after the wrong steps",
        "optim/batched/visits.py",
        "has_refreshes and not jobs and not",
        "has_refreshes and not",
        "optim/test_offload.py",
    ),
    Mutation(
        "offload: bases are written back after refreshes alone",
        "optim/batched/visits.py",
        " or x._version:",
        ":",
        "optim/test_offload.py",
    ),
    Mutation(
        "kernels: eps without the bias correction",
        "kernels/adam_in_basis/triton.py",
        "float(eps * scale)",
        "float(eps)",
        "kernels/test_adam_in_basis.py",
    ),
    Mutation(
        "kernels: half of the gradient of the squared logsumexp",
        "kernels/cross_entropy/reference.py",
        "(1 + 2 * z_loss * logsumexp_N)",
        "(1 + z_loss * logsumexp_N)",
        "kernels/test_cross_entropy.py",
    ),
    Mutation(
        "kernels: codes rounded down",
        "kernels/quantized/reference.py",
        "add_((1 << shift - 1) - ONE)",
        "sub_(ONE)",
        "kernels/test_quantized.py",
    ),
    Mutation(
        "kernels: noise that is the same at every step",
        "kernels/stochastic_rounding/reference.py",
        "(bits ^ key_of(step))",
        "(bits ^ key_of(0))",
        "kernels/test_stochastic_rounding.py",
    ),
    Mutation(
        "models: a window of one token too many",
        "models/token_positions.py",
        "key > query - window",
        "key >= query - window",
        "models/test_attention.py",
    ),
    Mutation(
        "attention in pieces: bands of one key too many",
        "models/attention_pieces.py",
        "(distance_QK < window)",
        "(distance_QK <= window)",
        "models/test_attention_pieces.py",
    ),
    Mutation(
        "attention in pieces: gradients of keys copied in place of added up",
        "models/attention_pieces.py",
        "dk_BGTN[keys] += dk",
        "dk_BGTN[keys] = dk",
        "models/test_attention_pieces.py",
    ),
    Mutation(
        "attention in slices: the late slice's gradients of keys written over the early slice's",
        "kernels/attention_slices/reference.py",
        "sum_BKX[:, : x.shape[1]] += x",
        "sum_BKX[:, : x.shape[1]] = x",
        "models/test_sliced_attention.py kernels/test_attention_slices.py",
    ),
    Mutation(
        "attention in slices: shares of outputs by the other's log-sum-exp",
        "kernels/attention_slices/reference.py",
        "(of_y_BHL - total_BHL).exp()",
        "(total_BHL - of_y_BHL).exp()",
        "models/test_sliced_attention.py kernels/test_attention_slices.py",
    ),
    Mutation(
        "context ranks: the last slices in the order of the ranks",
        "parallel/context_ranks.py",
        "*reversed(last_CBHX.unbind())",
        "*last_CBHX.unbind()",
        "distributed/test_context.py",
    ),
    Mutation(
        "block masks: full for one of its queries",
        "models/block_masks.py",
        "first_BQx.amax(-1).unsqueeze(-1) <= start_K",
        "first_BQx.amin(-1).unsqueeze(-1) <= start_K",
        "models/test_block_masks.py",
    ),
    Mutation(
        "models: heads keep only the columns that are rotated",
        "kernels/rotary/reference.py",
        "(turned_BSHR, rest_BSHN), dim=-1)",
        "(turned_BSHR, torch.zeros_like(rest_BSHN)), dim=-1)",
        "models/test_grouped_query.py",
    ),
    Mutation(
        "models: the gate of attention without its sigmoid",
        "models/attention.py",
        "attended_BSHN * gate_BSHN.sigmoid()",
        "attended_BSHN * gate_BSHN",
        "models/test_grouped_query.py",
    ),
    Mutation(
        "models: fresh zero-centered norms double",
        "models/layers.py",
        'torch.full_like(p, 0.0 if self.zero_centered else 1.0, device="cpu")',
        'torch.full_like(p, 1.0, device="cpu")',
        "models/test_layers.py",
    ),
    Mutation(
        "kernels: a norm adds the gradient of one reader of its rows only",
        "kernels/rms_norm/__init__.py",
        "grads = [grad for grad in of_rows if grad is not None]",
        "grads = [grad for grad in of_rows[:1] if grad is not None]",
        "kernels/test_rms_norm_rounded.py",
    ),
    Mutation(
        "kernels: experts' gradients forget those of earlier micro-batches",
        "kernels/grouped_weight_gradient/triton.py",
        "total += tl.load(before_ptr + at, mask=exists, other=0.0)",
        "total += 0 * tl.load(before_ptr + at, mask=exists, other=0.0)",
        "kernels/test_grouped_weight_gradient.py",
    ),
    Mutation(
        "kernels: a block of an expert's rows has some of the next one's",
        "kernels/grouped_weight_gradient/triton.py",
        "(end - start) // STEP * STEP",
        "tl.cdiv(end - start, STEP) * STEP",
        "kernels/test_grouped_weight_gradient.py",
    ),
    Mutation(
        "models: a gradient that its kernel has added is added again",
        "models/saving/weight_gradients.py",
        "if gradient is total:",
        "if False:",
        "models/test_weight_gradients.py",
    ),
    Mutation(
        "models: weights of experts elsewhere get a gradient",
        "kernels/route/reference.py",
        "return picked.masked_fill(row_TK < 0, 0)",
        "return picked",
        "models/test_experts.py",
    ),
    Mutation(
        "gathering: a unit of several blocks is freed after the first",
        "pipeline/gathering.py",
        "        if units != following:\n",
        "        if True:\n",
        "pipeline/test_gathering.py",
    ),
    Mutation(
        "gathering: what was gathered ahead is never freed",
        "pipeline/gathering.py",
        "        self.free(before)\n",
        "",
        "pipeline/test_gathering.py",
    ),
    Mutation(
        "models: the correction bias counts in the weights, too",
        "models/routing.py",
        "            scores_TE = scores_TE + bias_E\n",
        "            scores_TE.add_(bias_E)\n",
        "models/test_routing.py",
    ),
    Mutation(
        "models: groups are compared by their best expert alone",
        "models/routing.py",
        "topk(choice.best_of_group, dim=-1",
        "topk(1, dim=-1",
        "models/test_routing.py",
    ),
    Mutation(
        "models: the correction bias is rounded with the model",
        "models/routing.py",
        "after.dtype.itemsize < 4",
        "after.dtype.itemsize < 2",
        "models/test_routing.py",
    ),
    Mutation(
        "models: the correction bias is exported in the dtype of the weights",
        "models/hf/model_export.py",
        "dtype is None or is_bias",
        "dtype is None",
        "train/test_correction_bias.py",
    ),
    Mutation(
        "models: rows in FP8 have the factors of the first rows",
        "models/hf/fp8.py",
        "[first_row : first_row + rows]",
        "[:rows]",
        "models/test_fp8.py",
    ),
    Mutation(
        "models: the gate of the shared experts is not differentiated",
        "models/gated_mlp.py",
        "return grad_x, *grads, grad_weight_T, None",
        "return grad_x, *grads, None, None",
        "models/test_moe.py",
    ),
    Mutation(
        "models: gate and up exchanged on import and export",
        "models/hf/key_map.py",
        "{gate: slice(0, half), up: slice(half, 2 * half)}",
        "{up: slice(0, half), gate: slice(half, 2 * half)}",
        "models/test_huggingface.py",
    ),
    Mutation(
        "pipeline: an alias is told by the tensor, not by its storage",
        "pipeline/tape.py",
        "storage is other.untyped_storage() for",
        "x is other for",
        "pipeline/test_segments.py",
    ),
    Mutation(
        "parallel: a token counts once for each of its experts on a rank",
        "kernels/exchange_plan/reference.py",
        "row_TK, ~row_TK).int()",
        "row_TK, row_TK).int()",
        "distributed/test_expert.py",
    ),
    Mutation(
        "parallel: copies of a parameter counted in the norm",
        "parallel/local_parameters.py",
        "            and entry.info.replica == 0\n",
        "",
        "distributed/test_engine.py distributed/test_training.py",
    ),
    Mutation(
        "engine: labels counted over all ranks of a pipeline",
        "engine/shares.py",
        "dist.all_reduce(total, group=self._mesh.data_group)",
        "dist.all_reduce(total)",
        "distributed/test_engine.py distributed/test_training.py",
    ),
    Mutation(
        "launch: a signal is told as an exit status",
        "parallel/launch/start.py",
        "if status > 0:",
        "if status < 0:",
        "distributed/test_faults.py",
    ),
    Mutation(
        "data: every epoch in the order of the first",
        "data/order.py",
        "(*key, int(epoch))",
        "(*key, 0)",
        "data/test_order.py",
    ),
    Mutation(
        "checkpoint: the folder is not on disk before it has its name",
        "checkpoint/save.py",
        "        sync(self.aside)\n",
        "",
        "train/test_checkpoint.py",
    ),
    Mutation(
        "train: a fork without the row of its last step",
        "train/start.py",
        'row["step"] <= step]',
        'row["step"] < step]',
        "train/test_fork.py",
    ),
    Mutation(
        "memory: a rung of the advice builds on settings that saved nothing",
        "memory/advice.py",
        "if lightest.plan.needed <= HELPS * self.best.plan.needed:",
        "if planned:",
        "memory/test_advice.py",
    ),
    Mutation(
        "commands: the value after an option that has one of its own",
        "commands/parsing.py",
        "[value] if equals else []",
        "[]",
        "train/test_optim_config.py",
    ),
    Mutation(
        "qk-clip: every rank scales by the factors of the first rows",
        "engine/qk_clip.py",
        "factor_X[first : first + entry.info.length]",
        "factor_X[: entry.info.length]",
        "distributed/test_qk_clip.py",
    ),
    Mutation(
        "mtp: a depth sees into the next document",
        "models/mtp.py",
        "documents_BS != later(documents_BS, -1)",
        "documents_BS > later(documents_BS, -1)",
        "models/test_mtp.py",
    ),
    Mutation(
        "mtp: the state passes on without the norm of its depth",
        "models/decoder.py",
        "x_BSD = mtp.norm(x_BSD)\n            output.mtp_losses.append(head(x_BSD,",
        "output.mtp_losses.append(head(mtp.norm(x_BSD),",
        "models/test_mtp.py",
    ),
    Mutation(
        "mtp: losses are not averaged over depths",
        "engine/shares.py",
        "self._mtp_loss_weight / num_depths",
        "self._mtp_loss_weight",
        "distributed/test_mtp.py",
    ),
    Mutation(
        "mtp: labels are those of this data rank alone",
        "engine/shares.py",
        "dist.all_reduce(counts_N2, group",
        "dist.all_reduce(counts_N2.clone(), group",
        "distributed/test_padding.py",
    ),
    Mutation(
        "qk-clip: the least of the ranks' logits",
        "engine/step_reading.py",
        "dist.all_reduce(logits, dist.ReduceOp.MAX)",
        "dist.all_reduce(logits, dist.ReduceOp.MIN)",
        "distributed/test_qk_clip.py",
    ),
    Mutation(
        "qk-clip: the rotary query shares its factor with a key that gets none",
        "models/latent_attention.py",
        "gamma_H1.expand(-1, self.rotary.size)",
        "gamma_H1.sqrt().expand(-1, self.rotary.size)",
        "models/test_attention_logits.py",
    ),
    Mutation(
        "qk-clip: a key is scaled for the worst of its heads",
        "models/attention.py",
        "gamma_GR.amax(1, keepdim=True)",
        "gamma_GR.amin(1, keepdim=True)",
        "models/test_attention_logits.py",
    ),
    Mutation(
        "attention logits: padding counts",
        "models/token_positions.py",
        "first_BS.masked_fill(mask_BS, self.num_keys)",
        "first_BS.masked_fill(mask_BS, 0)",
        "models/test_attention_logits.py",
    ),
    Mutation(
        "context: a state crosses the beginning of a document",
        "kernels/gated_delta_rule/slices.py",
        "return x_BHKV * continues_BN[:, number, None, None, None]",
        "return x_BHKV",
        "kernels/test_gated_delta_rule_slices.py",
    ),
    Mutation(
        "context: the gradient of a state by its own slice alone",
        "kernels/gated_delta_rule/slices.py",
        "e_BNHKV[:, number] + m_BNHKK[:, number].mT @ grads[-1]",
        "e_BNHKV[:, number]",
        "kernels/test_gated_delta_rule_slices.py",
    ),
    Mutation(
        "context: the convolution begins anew with each slice",
        "models/sequence_slices.py",
        "return rows_RUC[:, : self.num_earlier].contiguous()",
        "return rows_RUC[:, : self.num_earlier] * 0",
        "distributed/test_context_delta_net.py",
    ),
    Mutation(
        "context: a rank's counts alone",
        "models/balance.py",
        "return count_E if self.context is None else self.context.add_up(count_E)",
        "return count_E",
        "distributed/test_context.py",
    ),
    Mutation(
        "layerwise: padding goes to an expert that was read",
        "models/streamed.py",
        "places_RK.masked_fill(experts_RK < 0, -1)",
        "places_RK",
        "models/test_streamed.py",
    ),
)


def main(names: list[str]) -> int:
    """Try the chosen mutations; returns 1 if one was missed, else 0."""
    chosen = [
        one for one in MUTATIONS if not names or any(one.name.startswith(name) for name in names)
    ]
    missed = 0
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy_checkout(tree)
        for mutation in chosen:
            start = time.monotonic()
            found = attempt(mutation, tree)
            missed += not found
            print(
                f"{'caught' if found else 'MISSED'}  {mutation.name}  ({found}; "
                f"{time.monotonic() - start:.0f} s)",
                flush=True,
            )
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return min(missed, 1)


def copy_checkout(tree: Path) -> None:
    """Copy the files that git tracks, or would track, as they are now."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def attempt(mutation: Mutation, tree: Path) -> str:
    """Put the mutation into the tree, return what `first_failure` finds, and restore the file."""
    file = tree / "src" / "lather" / mutation.file
    text = file.read_text("utf-8")
    if text.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times: bring the "
            "mutation up to date"
        )
    write(file, text.replace(mutation.old, mutation.new))
    try:
        return first_failure([f"tests/{name}" for name in mutation.tests.split()], tree)
    finally:
        write(file, text)


def write(file: Path, text: str) -> None:
    """Write a module and delete what was compiled of it: Python would use that again if the new
    text is as long and was written within the same second."""
    file.write_text(text, "utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def first_failure(tests: list[str], tree: Path) -> str:
    """Run the tests; returns the first that fails and its message, or an empty string."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree))),
        "COLUMNS": "300",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    done = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    # else no test ran, and nothing was found out
    if not re.search(r"\d (passed|failed)", done.stdout):
        raise SystemExit(
            f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    failed = re.search(r"^FAILED (.+)", done.stdout, re.MULTILINE)
    return (
        ""
        if failed is None or re.search("Timeout|ImportError|ModuleNotFound", failed[1])
        else failed[1]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
