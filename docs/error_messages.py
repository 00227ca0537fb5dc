"""Provokes the messages that docs/troubleshooting.md quotes: a comment before a block says which
command prints it.

    python docs/error_messages.py            writes what the commands print now into the page
    python docs/error_messages.py --check    writes nothing; exit code 1 if the page quotes
                                             something else

The commands run in one process, in a folder with what a reader who meets the message would have
there (`prepare`). A block:

    <!-- printed by: lather train configs/quick.toml -->
    ```text
    lather: error: configs/quick.toml: no such file; configs/ of the checkout holds examples
    ```
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest.mock import patch

from lather.cli import main as lather
from lather.config.toml_file import config_to_toml, load_config

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs/troubleshooting.md"
PROVOKED = re.compile(
    r"(<!-- printed by: (.*?) -->\n```text\n)(.*?)(^```)", re.DOTALL | re.MULTILINE
)
WIDTH = 120
"""Width of a quoted message, in characters."""


def prepare(folder: Path) -> None:
    """Put into `folder` the checkout's configurations, a few faulty files, a run of an older
    format, and a run whose newest checkpoint is damaged."""
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    files = {
        "my.toml": "[train]\nstepz = 5\n",
        "broken.toml": "[train\nsteps = 5\n",
        "notes/a.md": "text",
        "broken.jsonl": '{"content": "text"}\nno JSON\n',
        "one/a.py": "print()",
        "base/config.json": '{"model_type": "llama"}',
        "my-model/config.json": "{}",
        "runs/old/config.toml": "format = 1\n",
        "runs/quickstart/checkpoints/step-00000320/state.json": "{}",
        "runs/quickstart/config.toml": config_to_toml(
            load_config(REPOSITORY / "configs/quickstart.toml").resolved()
        ),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def printed_by(command: str) -> str:
    """Run a command line in the current folder, with variables of the environment before it;
    returns what it prints to standard error."""
    words = shlex.split(command)
    variables = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    error = io.StringIO()
    with (
        patch.dict(os.environ, variables),
        contextlib.redirect_stderr(error),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        assert lather(words[1:]) == 2, command
    lines = textwrap.wrap(error.getvalue(), WIDTH, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


def rewritten(page: str) -> str:
    """Return the page with the messages that its commands print now."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        os.chdir(folder)
        try:
            return PROVOKED.sub(lambda found: found[1] + printed_by(found[2]) + found[4], page)
        finally:
            os.chdir(before)


def main() -> int:
    before = PAGE.read_text()
    after = rewritten(before)
    if "--check" not in sys.argv:
        PAGE.write_text(after)
        return 0
    if before != after:
        print(
            f"{PAGE.name}: a message is not what is printed now: run python docs/error_messages.py",
            file=sys.stderr,
        )
    return int(before != after)


if __name__ == "__main__":
    raise SystemExit(main())
