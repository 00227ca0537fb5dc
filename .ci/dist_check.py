"""Installs the wheel, then the sdist, away from the checkout, and uses what was installed.

    python .ci/dist_check.py dist        run it with the Python of .venv

The new environments borrow the other packages of .venv, because installing torch again would take
minutes. They do not borrow an editable lather: Python reads no path file of a folder that is merely
on PYTHONPATH.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = tuple(
    f"lather/{name}"
    for name in (
        "py.typed",
        "commit.txt",
        "page.css",
        "page.html",
        "page.js",
        "train/report_page.html",
        "optim/rules/soap.py",
    )
)
CONFIG = """
[model]
vocab_size = 260
hidden_size = 16
intermediate_size = 24
moe_intermediate_size = 8
num_hidden_layers = 2
num_attention_heads = 2
n_routed_experts = 4
max_position_embeddings = 64

[train]
steps = 3
batch_size = 2
sequence_length = 16
validation_sequences = 2
"""
IMPORT_OPTIM = """
import sys
for name in {others!r}:
    sys.modules[name] = None  # importing it is an error
import lather.optim, torch
optimizer = lather.optim.SOAP([torch.nn.Parameter(torch.ones(2, 3))])
print(lather.__file__)
"""


def main() -> int:
    dist = Path(sys.argv[1]).resolve()
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    requirements = check_contents(wheel)
    with tempfile.TemporaryDirectory(prefix="lather-dist-") as name:
        folder = Path(name)
        for archive in (wheel, sdist):
            python = environment(folder / archive.name, archive)
            found = call(
                folder,
                python,
                "-c",
                IMPORT_OPTIM.format(others=sorted(requirements - {"torch", "numpy"})),
            )
            expect(
                Path(found.strip()).is_relative_to(folder),
                f"{archive.name}: lather.optim comes from {found}",
            )
            print(f"{archive.name}: lather.optim, with torch alone")
            if archive == wheel:
                use_command(folder, python.with_name("lather"))
    return 0


def check_contents(wheel: Path) -> set[str]:
    """Check the files of the wheel; returns the packages that it requires."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (
            archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")
        )
    for name in NEEDED:
        expect(name in names, f"{wheel.name}: lacks {name}")
    folders = {name.partition("/")[0] for name in names}
    expect(
        folders == {"lather", f"{wheel.name.partition('-py3')[0]}.dist-info"},
        f"{wheel.name}: has the folders {sorted(folders)}",
    )
    required = Parser().parsestr(metadata).get_all("Requires-Dist") or []
    return {one.partition(">")[0].replace("-", "_") for one in required if "extra ==" not in one}


def environment(folder: Path, archive: Path) -> Path:
    """Make an environment that has nothing of its own but the archive; returns its Python."""
    call(ROOT, sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    install = [
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    packages = Path(
        call(ROOT, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    # setuptools, to build an sdist
    borrowed = {
        **os.environ,
        "PYTHONPATH": sysconfig.get_path("purelib"),
    }
    call(
        ROOT,
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        *install,
        "--ignore-installed",
        archive,
        environ=borrowed,
    )
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def use_command(folder: Path, lather: Path) -> None:
    """Use the installed command: its version, a command that needs a checkout, and a short
    training."""
    version = call(folder, lather, "--version")
    commit = call(ROOT, "git", "rev-parse", "HEAD").strip()
    expect(commit[:12] in version, f"lather --version says {version!r}, and the commit is {commit}")
    said = call(folder, lather, "bench", "calls", status=2)
    expect("checkout" in said, f"lather bench says {said!r}")
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / "texts" / f"{number}.txt").write_text(
            f"The {number}th text is no longer than this sentence.\n" * 20
        )
    (folder / "run.toml").write_text(textwrap.dedent(CONFIG))
    call(
        folder,
        lather,
        "train",
        "run.toml",
        "--data.source",
        "texts",
        "--data.pattern",
        "*.txt",
        "--run-dir",
        "run",
    )
    for name in ("metrics.jsonl", "report.html"):
        expect((folder / "run" / name).is_file(), f"lather train wrote no {name}")
    print(f"{version.strip()}: lather bench, lather train")


def call(
    folder: Path, *command: object, status: int = 0, environ: dict[str, str] | None = None
) -> str:
    """Run a command in `folder`, which has to end with `status`; returns its output and errors."""
    environ = dict(os.environ if environ is None else environ)
    if environ.get("PYTHONPATH") != sysconfig.get_path("purelib"):
        environ.pop("PYTHONPATH", None)
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    expect(
        done.returncode == status,
        f"{' '.join(words)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}",
    )
    return done.stdout + done.stderr


def expect(holds: bool, problem: str) -> None:
    if not holds:
        sys.exit(problem)


if __name__ == "__main__":
    sys.exit(main())
