"""Provokes the messages that docs/troubleshooting.md quotes: a comment before a block says which
command prints it.

    python docs/error_messages.py            writes what the commands print now into the page
    python docs/error_messages.py --check    writes nothing; exit code 1 if the page quotes
                                             something else

The commands run in one process, in a folder with what a reader who meets the message would have
there (`prepare`). A block:

    <!-- printed by: lather train configs/quickstart.toml --train.device cuda -->
    ```text
    lather: error: train.device = 'cuda', but there is no CUDA device: use 'auto' or 'cpu'
    ```
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
import textwrap
from pathlib import Path

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
    """Put into `folder` the checkout's configurations, a faulty file, and a run whose newest
    checkpoint is damaged."""
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    config = load_config(REPOSITORY / "configs/quickstart.toml").resolved()
    files = {
        "broken.jsonl": '{"content": "text"}\nno JSON\n',
        "runs/quickstart/checkpoints/step-00000320/state.json": "{}",
        "runs/quickstart/config.toml": config_to_toml(config),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def printed_by(command: str) -> str:
    """Run a command line in the current folder; returns what it prints to standard error."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        assert lather(shlex.split(command)[1:]) == 2, command
    lines = textwrap.wrap(error.getvalue(), WIDTH, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


def rewritten(page: str) -> str:
    """Return the page with the messages that its commands print now."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        prepare(Path(folder))
        return PROVOKED.sub(lambda block: block[1] + printed_by(block[2]) + block[4], page)


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
