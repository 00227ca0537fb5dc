"""Hints in messages about arguments that an optimizer does not have name only what there is. (The
messages are in `mistakes.txt`.)"""

import inspect

import pytest
from optim_helpers import parameter

from lather.optim import MatrixOptimizer
from lather.optim.batched.known_keys import EQUIVALENTS, OTHER_NAMES
from lather.optim.optimizers import OPTIMIZER_OF
from lather.optim.options import options_of
from lather.optim.rules import RULES


@pytest.mark.parametrize("cls", OPTIMIZER_OF.values())
def test_every_optimizer_hints_only_at_arguments_that_it_has(cls: type[MatrixOptimizer]) -> None:
    own = inspect.signature(cls).parameters
    for name in {*EQUIVALENTS, *OTHER_NAMES, "learning_rat", "weightdecay"} - own.keys():
        with pytest.raises(TypeError) as raised:
            cls([parameter(3, 3)], **{name: 1})
        hint = str(raised.value).partition(". Its arguments are")[0]
        assert {meant.partition("'")[0] for meant in hint.split("did you mean '")[1:]} <= own.keys()


def test_equivalents_are_options() -> None:
    known = {name for rule in RULES.values() for name in options_of(rule)}
    assert {option for pairs in EQUIVALENTS.values() for option, _ in pairs} <= known
