"""Commands that are called in the process of the tests."""

from collections.abc import Callable

import pytest

from lather.cli import main

Lather = Callable[..., str]


@pytest.fixture
def lather(capsys: pytest.CaptureFixture[str]) -> Lather:
    """Runs a command that has to end with `status`; returns what it prints, or, if it fails, the
    one line of its error. A text that begins with a dash is divided at its spaces."""

    def run(*arguments: object, status: int = 0) -> str:
        capsys.readouterr()
        words = [
            word
            for argument in arguments
            for word in (
                argument.split()
                if isinstance(argument, str) and argument.startswith("-")
                else [str(argument)]
            )
        ]
        assert main(words) == status, capsys.readouterr().err
        captured = capsys.readouterr()
        if status:
            assert len(captured.err.splitlines()) == 1
        return captured.err if status else captured.out

    return run
