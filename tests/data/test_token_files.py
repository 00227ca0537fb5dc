"""Token files in other programs' formats, written here by the formats' definitions, are read back
token for token, and damaged ones are named."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making_helpers import Make, documents_of

from lather.data.dataset import DataSet
from lather.data.token_files import TokenFileError, open_token_file
from lather.errors import DataError

END = 7
DOCUMENTS = [[1, 2, 3, END], [END], [300, 5, 5, 5, 5, END], [9, END]] * 3
FLAT = [token for document in DOCUMENTS for token in document]


@pytest.fixture
def make(make: Make) -> Make:
    """Make a data set of token files without a tokenizer."""
    return lambda *files, **options: make(*files, tokenizer="", **{"vocab_size": 400} | options)


def megatron(folder: Path, dtype: str = "<u2", documents: list[list[int]] = DOCUMENTS) -> Path:
    """Write NAME.bin and NAME.idx as Megatron-LM's `IndexedDatasetBuilder` does, one sequence per
    document."""
    lengths = np.array([len(document) for document in documents], "<i4")
    flat = np.array([token for document in documents for token in document], dtype)
    (folder / "some.bin").write_bytes(flat.tobytes())
    code = {"<u2": 8, "<i4": 4, "<i8": 5}[dtype]
    pointers = (np.cumsum(lengths) - lengths) * flat.itemsize
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    parts = (lengths, pointers.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
    (folder / "some.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    return folder / "some.bin"


def datatrove(folder: Path, dtype: str = "<u2") -> Path:
    """Write NAME.ds, NAME.ds.index and NAME.ds.metadata as datatrove's `TokenizedFile` does."""
    (folder / "00000_some.ds").write_bytes(np.array(FLAT, dtype).tobytes())
    ends = np.cumsum([len(document) for document in DOCUMENTS])
    (folder / "00000_some.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    metadata = f"gpt2|{np.dtype(dtype).itemsize}\n{len(FLAT)}\n52 T"
    (folder / "00000_some.ds.metadata").write_text(metadata)
    return folder / "00000_some.ds"


def llm_c(folder: Path, dtype: str = "<u2") -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = (20240520, 1, len(FLAT)) if dtype == "<u2" else (20240801, 7, len(FLAT))
    (folder / "some.bin").write_bytes(header.tobytes() + np.array(FLAT, dtype).tobytes())
    return folder / "some.bin"


def bare(folder: Path, dtype: str = "<u2") -> Path:
    (folder / "some.bin").write_bytes(np.array(FLAT, dtype).tobytes())
    return folder / "some.bin"


def numpy_file(folder: Path, dtype: str = "<u2") -> Path:
    np.save(folder / "some.npy", np.array(FLAT, dtype))
    return folder / "some.npy"


MAKERS: dict[str, tuple[Callable[..., Path], str]] = {
    "megatron": (megatron, ""),
    "datatrove": (datatrove, ""),
    "llm.c": (llm_c, ""),
    "bare": (bare, "uint16"),
    "numpy": (numpy_file, ""),
}
WIDE = {"megatron": "<i4", "datatrove": "<u4", "llm.c": "<u4", "numpy": "<i8"}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_format_is_read_back_token_for_token(make: Make, tmp_path: Path, kind: str) -> None:
    write, token_dtype = MAKERS[kind]
    (tmp_path / "theirs").mkdir()
    write(tmp_path / "theirs")
    dataset = make(tmp_path / "theirs", end_token=END, token_dtype=token_dtype)
    assert documents_of(dataset) == DOCUMENTS
    assert dataset.manifest.splits["train"].longest == 6
    assert dataset.tokenizer is None
    assert DataSet(dataset.folder).manifest == dataset.manifest


@pytest.mark.parametrize("kind", WIDE)
def test_wider_integers_are_the_same_tokens(make: Make, tmp_path: Path, kind: str) -> None:
    path = MAKERS[kind][0](tmp_path, WIDE[kind])
    assert documents_of(make(path, vocab_size=70_000, end_token=END)) == DOCUMENTS


def test_documents_of_an_index_need_no_end_of_text(make: Make, tmp_path: Path) -> None:
    documents = [[1, 2], [3], [4, 5, 6]]
    assert documents_of(make(megatron(tmp_path, documents=documents))) == documents


def test_one_document_in_many_is_held_out(make: Make, tmp_path: Path) -> None:
    path = megatron(tmp_path, documents=[[n, n] for n in range(40)])
    dataset = make(path, holdout_every=20)
    assert documents_of(dataset, "validation") == [[10, 10], [30, 30]]
    assert documents_of(dataset) == [[n, n] for n in range(40) if n not in (10, 30)]


def edit(path: Path, place: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + len(value)] = value
    path.write_bytes(bytes(content))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def set_index(place: int, value: bytes) -> Callable[[Path], object]:
    return lambda path: edit(path.with_suffix(".idx"), place, value)


def delete(suffix: str) -> Callable[[Path], object]:
    return lambda path: path.with_name(path.name + suffix).unlink()


def save(array: Any) -> Callable[[Path], object]:
    return lambda path: np.save(path, array, allow_pickle=True)


NO_INDEX = b"no index at all, but as long as one is"
FLAT_ARRAY = "not a flat array of integers"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "megatron, tokens cut": ("megatron", shorten, "has 76 bytes, not 78"),
    "megatron, index cut": (
        "megatron",
        lambda path: shorten(path.with_suffix(".idx")),
        r"some\.idx has .* bytes, not",
    ),
    "megatron, no index": (
        "megatron",
        lambda path: path.with_suffix(".idx").write_bytes(NO_INDEX),
        "not a Megatron index",
    ),
    "megatron, version": ("megatron", set_index(9, b"\x02"), "version 2"),
    "megatron, floats": ("megatron", set_index(17, b"\x06"), "type 6"),
    "megatron, pointers": (
        "megatron",
        set_index(34 + 4 * 12 + 8, b"\1"),
        "do not follow each other",
    ),
    "megatron, documents": ("megatron", set_index(34 + 12 * 12, b"\1"), "do not match its 12"),
    "datatrove, no index": ("datatrove", delete(".index"), r"\.ds\.index, the index .* is missing"),
    "datatrove, tokens cut": ("datatrove", shorten, "does not match its 76 bytes"),
    "datatrove, a mask": (
        "datatrove",
        lambda path: path.with_name(path.name + ".loss").write_bytes(b"\1"),
        "Lather cannot read it",
    ),
    "llm.c, tokens cut": ("llm.c", shorten, "has 1,100 bytes, not 1,102"),
    "numpy, cut": ("numpy", shorten, "not a numpy array"),
    "numpy, floats": ("numpy", save(np.ones(3)), f"float64, {FLAT_ARRAY}"),
    "numpy, two dims": ("numpy", save(np.ones((3, 2), np.uint16)), FLAT_ARRAY),
    "numpy, no array": ("numpy", lambda path: path.write_bytes(b"else"), "not a numpy array"),
    "numpy, pickle": ("numpy", save(np.array([{}], object)), "not a numpy array"),
    "bare, no width": ("bare", lambda path: None, "give --token-dtype"),
    "lone index": ("megatron", lambda path: path.unlink(), "an index, but some.bin is missing"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_says_what_is_wrong_and_is_a_counted_skip(
    make: Make, tmp_path: Path, case: str
) -> None:
    kind, damage, message = DAMAGE[case]
    path = MAKERS[kind][0](tmp_path)
    damage(path)
    path = path if path.exists() else path.with_suffix(".idx")
    with pytest.raises(TokenFileError, match=message):
        open_token_file(path)
    np.save(tmp_path / "sound.npy", np.array([1, 2, END], np.uint16))
    dataset = make(path, tmp_path / "sound.npy", end_token=END)
    assert documents_of(dataset) == [[1, 2, END]]
    assert dataset.manifest.skipped == {"no tokens": 1}


def test_an_index_in_place_of_its_tokens_names_them(tmp_path: Path) -> None:
    path = MAKERS["megatron"][0](tmp_path)
    with pytest.raises(TokenFileError, match=f"an index: give {path.name}"):
        open_token_file(path.with_suffix(".idx"))


@pytest.mark.parametrize(("tokens", "worst"), [([1, 400], 400), ([-1, 3], -1)])
def test_a_token_outside_the_vocabulary_is_an_error(
    make: Make, tmp_path: Path, tokens: list[int], worst: int
) -> None:
    np.save(tmp_path / "some.npy", np.array(tokens, np.int32))
    fault = rf"some\.npy: token {worst} is outside the vocabulary of 400"
    with pytest.raises(DataError, match=fault):
        make(tmp_path / "some.npy")
    assert not (tmp_path / "ours").exists()


def test_token_files_and_texts_do_not_mix(make: Make, tmp_path: Path) -> None:
    numpy_file(tmp_path)
    (tmp_path / "some.txt").write_text("text")
    with pytest.raises(DataError, match="some sources are token files and others texts"):
        make(tmp_path)
