"""Names of torch that are not public stand in one file."""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "lather"
PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!_version__)\w+|\._base\b|\bfrom torch(\.\w+)*\._\w+|\bfrom torch\S* import _\w+")


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
    ):
        assert private_names(line)
    for line in ("torch.__version__", "import torch.nn.functional as F", "torch.mm(a, b)", "x.mul_(2)"):
        assert not private_names(line)
