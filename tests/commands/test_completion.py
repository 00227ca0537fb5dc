"""The scripts that `lather completion` prints, sourced and called in a shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lather.cli import COMMANDS, main

BASH = r"""
try() {
    COMP_WORDS=("$@"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    _shtab_lather; echo "${COMPREPLY[*]}"
}
try lather ""
try lather tr
try lather train x.toml --optim.sch
try lather train x.toml --optim.schedule ""
try lather train --optim.name soap_
try lather train --help ch
try lather plan x.toml --wo
try lather data make there corpus --sep
try lather bench pi
try lather export run there --dtype b
try lather train con
try lather train --run-dir con
complete -p lather
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").touch()
    file = tmp_path / "ask.bash"
    file.write_text(script("bash", capsys) + BASH)
    done = subprocess.run(
        ["bash", "--norc", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
    )
    assert done.stderr == ""
    commands, *found = done.stdout.splitlines()
    assert set(COMMANDS) <= set(commands.split())
    assert found == [
        "train",
        "--optim.schedule",
        "constant linear cosine wsd 1-sqrt power",
        "soap_muon",
        "checkpoint",
        "--world",
        "--separator",
        "pipeline",
        "bf16",
        "config.toml",
        "config.toml",
        "complete -o bashdefault -F _shtab_lather lather",
    ]


def test_other_shells_and_none(capsys: pytest.CaptureFixture[str]) -> None:
    zsh, fish = script("zsh", capsys), script("fish", capsys)
    for option in ("optim.schedule", "separator", "optim.rest.rule"):
        assert f"--{option}" in zsh
        assert f"-l {option}" in fish
    for text in (zsh, fish):
        assert "constant linear cosine wsd 1-sqrt power" in text
    assert main(["completion", "--help"]) == 0
