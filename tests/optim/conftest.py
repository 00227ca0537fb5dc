"""Functions inside functions are not type-checked here: the import hook would decorate, and compile, them anew at every call."""

from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest


def _unchecked(**_: Any) -> Callable[[Any], Any]:
    return lambda function: function


@pytest.fixture(autouse=True)
def _inner_functions_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping, "jaxtyped", _unchecked)
