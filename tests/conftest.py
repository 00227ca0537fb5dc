"""Gives the tests to processes: long ones first, whole files, and one process all tests whose ranks
need the cores for themselves."""

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; one that only gives them to others would take a second for
    nothing."""
    if not config.option.tx or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("tester")


FIRST = ("distributed", "train", "bench", "memory", "test_examples.py")
"""Folders and files whose tests take longest; they are started first, so that two workers end
together."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import other people's trainers for tests that are not asked for."""
    return (
        collection_path.name == "integrations" and "not integrations" in config.option.markexpr
    ) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    """Return the place of a test in FIRST, whatever the folders above the tests are called."""
    parts = item.path.relative_to(Path(__file__).parent).parts
    return next((place for place, name in enumerate(FIRST) if name in parts), len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Give a worker whole files, so that fixtures of modules are made once, and one worker all the
    tests whose ranks need the cores for themselves."""
    config.option.loadscopereorder = False  # otherwise files with many tests would go first
    return _ByFile(config, log)


class _ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "distributed" if "/distributed/" in file else file
