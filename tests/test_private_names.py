"""Names of torch that are not public stand in one file."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lather.errors import UserError
from lather.torch_private import check_torch_version, finish_gradient_reduction, prepare_sharding, start_gradient_reduction

SOURCE = Path(__file__).parents[1] / "src" / "lather"
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!_version__)\w+|\._base\b|\bfrom torch(\.\w+)*\._\w+|\bfrom torch\S* import _\w+"
    r"|\._(fsdp|lazy_init|root_post_backward|state_ctx|local_tensor)\w*\b|\bpost_backward\(|\bfully_shard\.state\b"
)
"""The second line: FSDP2's, which stand on objects and not on modules."""


def private_names(text: str) -> list[str]:
    return [match[0] for match in PRIVATE.finditer(text)]


def test_private_names_of_torch_stand_in_one_file() -> None:
    found = {file.relative_to(SOURCE).as_posix(): private_names(file.read_text("utf-8")) for file in SOURCE.rglob("*.py")}
    assert {name for name, names in found.items() if names} == {"torch_private.py"}


def test_the_pattern_sees_private_names_and_lets_public_ones_be() -> None:
    for line in (
        "torch._C.x()",
        "torch._foreach_mul_(a, b)",
        "from torch.utils._pytree import tree_map",
        "x._base",
        "from torch import _C",
        "state._lazy_init()",
        "group.post_backward()",
        "fully_shard.state(module)",
        "p._local_tensor",
    ):
        assert private_names(line)
    for line in ("torch.__version__", "import torch.nn.functional as F", "torch.mm(a, b)", "x.mul_(2)", "p.to_local()", "module.reshard()"):
        assert not private_names(line)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu128", "2.13.0a0+git12ab"])
def test_known_versions_of_torch_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    check_torch_version()


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0", "2.14.0", "2.14.0.dev20261101+cpu", "3.0.0"])
def test_other_versions_are_refused_with_the_remedy(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for use in (prepare_sharding, start_gradient_reduction, finish_gradient_reduction):
        with pytest.raises(UserError, match=rf"(?s)torch {re.escape(version)} .*install torch >= 2\.11 and < 2\.14"):
            use(nn.Linear(1, 1))


@pytest.mark.parametrize(
    "missing", ["_lazy_init", "_root_post_backward_final_callback", "_state_ctx", "_fsdp_param_group", "post_backward"]
)
def test_a_name_that_is_gone_is_named_when_sharding_is_set_up(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(post_backward=print)
    state = SimpleNamespace(_lazy_init=dict, _root_post_backward_final_callback=print, _fsdp_param_group=group)
    state._state_ctx = SimpleNamespace(all_states=[state])
    delattr(group if missing == "post_backward" else state, missing)
    monkeypatch.setattr(fully_shard, "state", lambda module: state)
    with pytest.raises(UserError, match=rf"torch {re.escape(torch.__version__)} has no SimpleNamespace\.{missing}, .*install torch"):
        prepare_sharding(nn.Linear(1, 1))
