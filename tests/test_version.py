"""The version that the command prints, and the commit in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import lather
from lather import version

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


def commit_of(folder: Path) -> str:
    """Return the commit that a copy of the package in `folder` finds."""
    code = "from lather.version import find_commit; print(find_commit())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the two modules that this needs."""
    (tmp_path / "lather").mkdir()
    for name in ("__init__.py", "version.py"):
        shutil.copyfile(Path(lather.__file__).with_name(name), tmp_path / "lather" / name)
    return tmp_path


def test_the_commit_of_a_checkout_and_its_mark_if_files_differ(copied: Path) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            [*GIT, *arguments], cwd=copied, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    assert commit_of(copied) == "None"  # the copy lies in a checkout that does not track it
    git("add", "lather/__init__.py", "lather/version.py")
    git("commit", "-qm", "First")
    git("tag", "v1", "-am", "a tag")
    assert commit_of(copied) == git("rev-parse", "HEAD")
    (copied / "lather" / "__init__.py").write_text("changed = True\n")
    assert commit_of(copied) == git("rev-parse", "HEAD") + "-dirty"


def test_the_recorded_commit_where_there_is_no_checkout(copied: Path) -> None:
    assert commit_of(copied) == "None"
    (copied / "lather" / version.RECORD).write_text("1234\n")
    assert commit_of(copied) == "1234"


def test_the_line_of_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    python, torch = ".".join(map(str, sys.version_info[:3])), metadata.version("torch")
    for commit, shown in (
        ("0123456789abcdef-dirty", "0123456789ab-dirty"),
        (None, "commit unknown"),
    ):
        monkeypatch.setattr(version, "find_commit", lambda commit=commit: commit)
        expected = f"lather {lather.__version__} ({shown}), torch {torch}, Python {python}"
        assert version.describe_version() == expected
