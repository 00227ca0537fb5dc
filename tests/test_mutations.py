"""The deliberate errors of `.ci/mutations.py` still fit the package, so that the list does not rot
between the hours in which it is run."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MUTATIONS = runpy.run_path(str(ROOT / ".ci" / "mutations.py"))["MUTATIONS"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_an_error_has_one_place_in_a_file_that_still_compiles_and_tests_that_exist(
    mutation: Any,
) -> None:
    text = (ROOT / "src" / "lather" / mutation.file).read_text("utf-8")
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    assert all((ROOT / "tests" / name).is_file() for name in mutation.tests.split())


def test_errors_have_names_of_their_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
