"""All that lies in a folder is read once, or counted with the reason: links, pipes, lost files."""

import gzip
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import making_helpers
import numpy as np
import pytest
from making_helpers import Make, lines

from lather.cli import main
from lather.data import sources
from lather.data.config import DataConfig
from lather.data.dataset import SKIPPED, DataSet
from lather.data.making import divide_sources, make_dataset
from lather.data.opening import open_datasets
from lather.data.recipe import DataRecipe
from lather.errors import DataError

NOBODY = 65534


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with two files, and one that links will lead to, with two files."""
    for name in ("tree/a/1.txt", "tree/z/2.txt", "other/3.txt", "other/in/4.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"this is the text of {name}")
    return tmp_path / "tree"


def names_of(dataset: DataSet) -> list[str]:
    rows = (dataset.folder / "files.jsonl").read_text().splitlines()
    return [json.loads(row)["name"] for row in rows]


def skips(dataset: DataSet, root: Path) -> dict[str, tuple[str, str]]:
    """Return the reason and the detail of each skipped path."""
    rows = making_helpers.skips(dataset)
    return {os.path.relpath(path, root): (reason, detail) for path, _, reason, detail in rows}


def link(path: Path, target: str | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def test_a_linked_folder_gives_what_a_copy_of_it_gives(
    tree: Path, tmp_path: Path, make: Make
) -> None:
    link(tree / "m", tmp_path / "other")
    linked = make(tree)
    assert names_of(linked) == ["a/1.txt", "m/3.txt", "m/in/4.txt", "z/2.txt"]
    assert linked.manifest.skipped == {}
    shutil.copytree(tree, tmp_path / "copied", symlinks=False)
    assert make(tmp_path / "copied", name="copy").manifest.identity == linked.manifest.identity
    link(tmp_path / "way", tree)
    assert make(tmp_path / "way", name="by link").manifest.identity == linked.manifest.identity


def test_each_file_is_read_once_and_circles_end(tree: Path, tmp_path: Path, make: Make) -> None:
    other = tmp_path / "other"
    link(tree / "b", other)
    link(tree / "a/again", other)
    link(tree / "c", other / "in")
    link(tree / "0.txt", "a/1.txt")
    link(tree / "four.txt", other / "in/4.txt")
    link(tree / "a/root", tree)
    link(tree / "a/here", ".")
    link(tree / "z/above", tmp_path)
    link(other / "in/back", tree / "a")
    link(other / "in/up", other)
    link(tree / "way", tree / "to")
    link(tree / "to", tree / "a/../z/2.txt")
    dataset = make(tree)
    assert names_of(dataset) == ["a/1.txt", "a/again/3.txt", "a/again/in/4.txt", "z/2.txt"]
    again, circle = "read by another path", "link to a folder that it is in"
    assert skips(dataset, tree) == {
        "0.txt": (again, str(tree / "a/1.txt")),
        "a/again/in/back": (again, str(tree / "a")),
        "a/again/in/up": (circle, str(other)),
        "a/here": (circle, str(tree / "a")),
        "a/root": (circle, str(tree)),
        "b": (again, str(other)),
        "c": (again, str(other / "in")),
        "four.txt": (again, str(other / "in/4.txt")),
        "to": (again, str(tree / "z/2.txt")),
        "way": (again, str(tree / "z/2.txt")),
        "z/above": (circle, str(tmp_path)),
    }


def test_the_list_does_not_depend_on_the_order_of_entries(
    tree: Path, tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("y", "b", "a/n"):
        link(tree / name, tmp_path / "other")
        link(tree / f"{name}.txt", tmp_path / "other/in/4.txt")
    first, scandir = make(tree), os.scandir

    class Reversed:
        def __init__(self, folder: Path) -> None:
            self.entries = scandir(folder)
            self.close = self.entries.close

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            return iter(list(self.entries)[::-1])

        def __exit__(self, *error: object) -> None:
            self.close()

    monkeypatch.setattr(os, "scandir", Reversed)
    second = make(tree, name="second")
    assert names_of(second) == names_of(first)
    assert skips(second, tree) == skips(first, tree)
    assert second.manifest.identity == first.manifest.identity


def test_links_that_lead_nowhere_and_what_is_no_file_are_named(tree: Path, make: Make) -> None:
    link(tree / "gone", "nothing/here")
    link(tree / "itself", "itself")
    link(tree / "below", "a/1.txt/more")
    link(tree / "null", "/dev/null")
    os.mkfifo(tree / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(tree / "socket"))  # a long path is no address
        dataset = make(tree)
    assert skips(dataset, tree) == {
        "below": ("dangling link", "a/1.txt/more"),
        "gone": ("dangling link", "nothing/here"),
        "itself": ("dangling link", "itself"),
        "null": ("not a file", "a device"),
        "pipe": ("not a file", "a pipe"),
        "socket": ("not a file", "a socket"),
    }


def test_a_link_counts_where_the_file_itself_is_not_asked_for(tree: Path, make: Make) -> None:
    (tree / ".store").mkdir()
    (tree / ".store/blob").write_text("the text of a blob")
    link(tree / "snapshot/text.md", "../.store/blob")
    link(tree / "other.md", "a/1.txt")
    dataset = make(tree, pattern="*.md")
    assert names_of(dataset) == ["other.md", "snapshot/text.md"]
    assert dataset.manifest.skipped == {}


@pytest.fixture
def interrupted(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make a data set of small units, which is interrupted after some and continued."""
    monkeypatch.setattr(sources, "LEAST_UNIT_BYTES", 1)

    def make_twice(folder: Path, source: Path, after: int) -> tuple[DataSet, list[str]]:
        def stop(units: int, *counts: int) -> None:
            if units == after:
                raise KeyboardInterrupt

        recipe = DataRecipe((str(source),), tokenizer=str(tokenizer), holdout_every=0)
        with pytest.raises(KeyboardInterrupt):
            make_dataset(folder, recipe, print, 1, stop)
        (source / ".hidden").touch()  # which changes nothing
        notes: list[str] = []
        return make_dataset(folder, recipe, notes.append, 1), notes

    return make_twice


def test_making_goes_on_with_the_same_links(
    tree: Path, tmp_path: Path, make: Make, interrupted: Callable[..., Any]
) -> None:
    link(tree / "m", tmp_path / "other")
    link(tree / "gone", "nothing")
    whole = make(tree, name="whole")
    continued, notes = interrupted(tmp_path / "ours", tree, 2)
    assert notes == ["continuing: 2 of 4 units are done"]
    assert continued.manifest.identity == whole.manifest.identity
    assert (continued.folder / SKIPPED).read_bytes() == (whole.folder / SKIPPED).read_bytes()


def test_a_data_set_in_the_folder_it_is_made_of_is_not_read(
    tree: Path, make: Make, interrupted: Callable[..., Any]
) -> None:
    """Neither the next data set has it, nor does its making start again after an interruption."""
    first, notes = interrupted(tree / "ours", tree, 1)
    assert notes == ["continuing: 1 of 2 units are done"]
    second = make(tree, name="tree/second")
    assert names_of(second) == names_of(first) == ["a/1.txt", "z/2.txt"]
    assert second.manifest.identity == first.manifest.identity
    assert second.manifest.made_from["left_out"] == {"data set": 2, "hidden": 1}


def as_nobody(action: Callable[[], Any]) -> Any:
    """Return what the action gives in a process without the rights of root; it must fit JSON."""
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            answer = action()
        except BaseException as error:
            answer = repr(error)
        os.write(theirs, json.dumps(answer).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        answer = json.loads(file.read())
    os.waitpid(child, 0)
    return answer


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that every user can search, which pytest's own folders are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
        for folder in Path(name).iterdir():
            folder.chmod(0o755)


def listed(source: Path) -> list[Any]:
    listing = divide_sources(DataRecipe((str(source),), vocab_size=300)).sources
    return [[file.name for file in listing.files], list(map(list, listing.skipped))]


def test_folders_and_files_without_permission_are_counted(open_to_all: Path) -> None:
    root = open_to_all / "root"
    modes = {"closed": 0o000, "names only": 0o744, "through only": 0o711, "sound": 0o755}
    for name in modes:
        (root / name).mkdir(parents=True)
        (root / name / "1.txt").write_text("text")
    (root / "sound/2.txt").write_text("text")
    (root / "sound/2.txt").chmod(0o000)
    link(root / "link.txt", root / "through only/1.txt")
    link(root / "closed.txt", root / "closed/1.txt")
    link(root / "folder", root / "closed")
    for name, mode in modes.items():
        (root / name).chmod(mode)
    files, skipped = as_nobody(lambda: listed(root))
    for name in modes:
        (root / name).chmod(0o755)
    assert files == ["link.txt", "sound/1.txt"]
    denied = ["cannot be read", "Permission denied"]
    assert skipped == [
        [str(root / "closed"), *denied],
        [str(root / "closed.txt"), *denied],
        [str(root / "folder"), "read by another path", str(root / "closed")],
        [str(root / "names only/1.txt"), *denied],
        [str(root / "sound/2.txt"), *denied],
        [str(root / "through only"), *denied],
    ]


@pytest.mark.parametrize("mode", [0o000, 0o711, 0o744])
def test_a_source_without_permission_is_an_error_with_the_reason(
    open_to_all: Path, mode: int
) -> None:
    root = open_to_all / "root"
    root.mkdir()
    (root / "1.txt").write_text("text")
    root.chmod(mode)
    for source in (root, root / "1.txt") if mode != 0o711 else (root,):
        answer = as_nobody(lambda source=source: listed(source))
        assert answer.startswith("DataError")
        assert f"{source}" in answer
        assert "Permission denied" in answer


def test_sources_that_are_no_files_and_no_folders(tmp_path: Path, make: Make) -> None:
    os.mkfifo(tmp_path / "pipe")
    link(tmp_path / "gone", "nothing")
    link(tmp_path / "itself", "itself")
    (tmp_path / "links").mkdir()
    link(tmp_path / "links/gone", "nothing")
    for name, message in {
        "pipe": "pipe: it is a pipe, which cannot be read twice: write its text to a file",
        "gone": "gone (a link to nothing): no such file or folder: give one",
        "itself": "itself: cannot be read (Too many levels of symbolic links): give another",
        "links": "links/gone (dangling link: nothing): correct this, or give another folder",
    }.items():
        with pytest.raises(DataError) as caught:
            make(tmp_path / name)
        assert message in str(caught.value)


def of_kind(folder: Path, kind: str) -> Path:
    file, content = folder / f"b.{kind}", lines({"text": "some text"}).encode()
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": ["some text"]}), file)
    elif kind == "npy":
        np.save(file, np.ones(9, np.uint16))
    elif kind == "jsonl.zst":
        file.write_bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(content))
    else:
        file.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    return file


KINDS = ["txt", "jsonl", "json", "jsonl.gz", "jsonl.zst", "parquet", "npy"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_vanishes_before_it_is_read_is_counted(
    kind: str, tmp_path: Path, make: Make
) -> None:
    """The note about the tokenizer is given between listing and reading."""
    (tmp_path / "texts").mkdir()
    beside = "npy" if kind == "npy" else "txt"
    sound = of_kind(tmp_path, beside).rename(tmp_path / f"texts/a.{beside}")
    file = of_kind(tmp_path / "texts", kind)
    given = (sound, file) if kind == "json" else (tmp_path / "texts",)
    dataset = make(*given, note=lambda text: file.unlink())
    expected = {file.name: ("cannot be read", "No such file or directory")}
    assert skips(dataset, tmp_path / "texts") == expected
    assert dataset.manifest.splits["train"].documents == 1


def test_a_file_that_vanishes_while_it_is_listed_is_counted(
    tree: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = sources._file

    def vanish(path: Path, *arguments: Any, **options: Any) -> Any:
        (tree / "a/1.txt").unlink(missing_ok=True)
        return describe(path, *arguments, **options)

    monkeypatch.setattr(sources, "_file", vanish)
    expected = {"a/1.txt": ("cannot be read", "No such file or directory")}
    assert skips(make(tree), tree) == expected


def test_a_file_that_changes_while_it_is_read_is_counted(tree: Path, make: Make) -> None:
    dataset = make(tree, note=lambda text: (tree / "a/1.txt").write_text("shorter"))
    [(name, (reason, _))] = skips(dataset, tree).items()
    assert (name, reason) == ("a/1.txt", "changed while it was read")


def test_what_is_not_asked_for_is_counted(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (".git/config", "a/.hidden.txt", "a/notes.md", "z/more.md", "__pycache__/1.txt"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("text")
    link(tree / "gone", "nothing")
    command = ["data", "make", str(tmp_path / "ours"), str(tree), "--pattern", "*.txt"]
    main([*command, "--vocab-size", "300", "--holdout-every", "0"])
    told = capsys.readouterr().out
    assert "not taken    1 x dangling link; file and line of each are in" in told
    assert "left out     1 x folder __pycache__, 2 x hidden, 2 x not *.txt\n" in told


def test_a_run_in_its_own_source_keeps_its_data_set(tree: Path) -> None:
    config = DataConfig(source=str(tree), cache_dir=str(tree / "data"), holdout_every=2)
    folders = [open_datasets(config, 300, print)[0].folder for _ in range(2)]
    assert folders[0] == folders[1]


def test_index_files_belong_to_their_token_files(tmp_path: Path, make: Make) -> None:
    (tmp_path / "tokens").mkdir()
    np.zeros(4, np.uint16).tofile(tmp_path / "tokens/a.ds")
    np.array([4], np.uint64).tofile(tmp_path / "tokens/a.ds.index")
    dataset = make(tmp_path / "tokens", pattern="*.ds")
    assert dataset.manifest.made_from["left_out"] == {}
    assert names_of(dataset) == ["a.ds"]


def test_a_run_that_makes_its_data_set_tells_what_it_does_not_take(
    tree: Path, tmp_path: Path
) -> None:
    notes: list[str] = []
    link(tree / "gone", "nothing")
    (tree / "empty.txt").touch()
    config = DataConfig(source=str(tree), cache_dir=str(tmp_path / "data"), holdout_every=2)
    for _ in range(2):
        (dataset,) = open_datasets(config, 300, notes.append)
    assert len(notes) == 2
    assert notes[1].startswith("not taken: 1 x dangling link, 1 x empty; file and line")
    assert str(dataset.folder / SKIPPED) in notes[1]


def test_names_that_are_no_text_are_no_hindrance(tree: Path, make: Make) -> None:
    try:
        (tree / os.fsdecode(b"a/na\xefve.txt")).write_text("the text of a file with another name")
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    link(tree / os.fsdecode(b"g\xf6ne"), os.fsdecode(b"n\xf6thing"))
    dataset = make(tree)
    assert dataset.manifest.splits["train"].documents == 3
    assert dataset.manifest.skipped == {"dangling link": 1}
