"""Token files in other programs' formats, written here by the formats' definitions, are read back
token for token, and damaged ones are named."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from making_helpers import documents_of

from lather.data.dataset import DataSet
from lather.data.making import make_dataset
from lather.data.recipe import DataRecipe
from lather.data.token_files import TokenFileError, open_token_file
from lather.errors import DataError

END = 7
DOCUMENTS = [[1, 2, 3, END], [END], [300, 5, 5, 5, 5, END], [9, END]] * 3
FLAT = [token for document in DOCUMENTS for token in document]


def megatron(folder: Path, dtype: str = "<u2", documents: list[list[int]] = DOCUMENTS) -> Path:
    """Write NAME.bin and NAME.idx as Megatron-LM's `IndexedDatasetBuilder` does, one sequence per
    document."""
    codes = {"<u2": 8, "<i4": 4, "<i8": 5}
    lengths = [len(document) for document in documents]
    flat = np.array([token for document in documents for token in document], dtype)
    (folder / "some.bin").write_bytes(flat.tobytes())
    pointers = (
        np.concatenate([[0], np.cumsum(lengths)[:-1]]) * flat.itemsize if lengths else np.empty(0)
    )
    with (folder / "some.idx").open("wb") as file:
        file.write(
            b"MMIDIDX\x00\x00"
            + struct.pack("<QBQQ", 1, codes[dtype], len(lengths), len(lengths) + 1)
        )
        file.write(
            np.array(lengths, "<i4").tobytes()
            + pointers.astype("<i8").tobytes()
            + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
        )
    return folder / "some.bin"


def datatrove(folder: Path, dtype: str = "<u2") -> Path:
    """Write NAME.ds, NAME.ds.index and NAME.ds.metadata as datatrove's `TokenizedFile` does."""
    (folder / "00000_some.ds").write_bytes(np.array(FLAT, dtype).tobytes())
    ends = np.cumsum([len(document) for document in DOCUMENTS])
    (folder / "00000_some.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    (folder / "00000_some.ds.metadata").write_text(
        f"gpt2|{np.dtype(dtype).itemsize}\n{len(FLAT)}\n52 T"
    )
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
def test_every_format_is_read_back_token_for_token(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    make, token_dtype = MAKERS[kind]
    make(folder)
    recipe = DataRecipe(
        (str(folder),), vocab_size=400, end_token=END, token_dtype=token_dtype, holdout_every=0
    )
    dataset = make_dataset(tmp_path / "ours", recipe, print)
    assert documents_of(dataset, "train") == DOCUMENTS
    assert dataset.manifest.splits["train"].longest == 6
    assert dataset.tokenizer is None


@pytest.mark.parametrize("kind", WIDE)
def test_wider_integers_are_the_same_tokens(tmp_path: Path, kind: str) -> None:
    path = MAKERS[kind][0](tmp_path, WIDE[kind])
    dataset = make_dataset(
        tmp_path / "ours",
        DataRecipe((str(path),), vocab_size=70_000, end_token=END, holdout_every=0),
        print,
    )
    assert documents_of(dataset, "train") == DOCUMENTS


def test_documents_of_an_index_need_no_end_of_text(tmp_path: Path) -> None:
    documents = [[1, 2], [3], [4, 5, 6]]
    path = megatron(tmp_path, documents=documents)
    dataset = make_dataset(
        tmp_path / "ours", DataRecipe((str(path),), vocab_size=10, holdout_every=0), print
    )
    assert documents_of(dataset, "train") == documents


def test_one_document_in_many_is_held_out(tmp_path: Path) -> None:
    path = megatron(tmp_path, documents=[[n, n] for n in range(40)])
    dataset = make_dataset(
        tmp_path / "ours", DataRecipe((str(path),), vocab_size=40, holdout_every=20), print
    )
    assert documents_of(dataset, "validation") == [[10, 10], [30, 30]]
    assert documents_of(dataset, "train") == [[n, n] for n in range(40) if n not in (10, 30)]


def edit(path: Path, place: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + len(value)] = value
    path.write_bytes(bytes(content))


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "megatron, tokens cut": (
        "megatron",
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        "has 76 bytes, not 78",
    ),
    "megatron, index cut": (
        "megatron",
        lambda path: edit_idx(path, lambda content: content[:-9]),
        r"some\.idx has .* bytes, not",
    ),
    "megatron, no index": (
        "megatron",
        lambda path: edit_idx(path, lambda content: b"no index at all, but as long as one is"),
        "not a Megatron index",
    ),
    "megatron, version": (
        "megatron",
        lambda path: edit(path.with_suffix(".idx"), 9, b"\x02"),
        "version 2",
    ),
    "megatron, floats": (
        "megatron",
        lambda path: edit(path.with_suffix(".idx"), 17, b"\x06"),
        "type 6",
    ),
    "megatron, pointers": (
        "megatron",
        lambda path: edit(path.with_suffix(".idx"), 34 + 4 * 12 + 8, b"\x01"),
        "do not follow each other",
    ),
    "megatron, documents": (
        "megatron",
        lambda path: edit(path.with_suffix(".idx"), 34 + 12 * 12, b"\x01"),
        "do not match its 12",
    ),
    "datatrove, no index": (
        "datatrove",
        lambda path: path.with_name(path.name + ".index").unlink(),
        r"\.ds\.index, the index .* is missing",
    ),
    "datatrove, tokens cut": (
        "datatrove",
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        "does not match its 76 bytes",
    ),
    "datatrove, a mask": (
        "datatrove",
        lambda path: path.with_name(path.name + ".loss").write_bytes(b"\1"),
        "Lather cannot read it",
    ),
    "llm.c, tokens cut": (
        "llm.c",
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        "has 1,100 bytes, not 1,102",
    ),
    "numpy, cut": (
        "numpy",
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        "has 204 bytes, not 206",
    ),
    "numpy, floats": (
        "numpy",
        lambda path: np.save(path, np.ones(3)),
        "float64, not a flat array of integers",
    ),
    "numpy, two dims": (
        "numpy",
        lambda path: np.save(path, np.ones((3, 2), np.uint16)),
        "not a flat array",
    ),
    "numpy, no array": (
        "numpy",
        lambda path: path.write_bytes(b"something else"),
        "not a numpy array",
    ),
    "numpy, pickle": (
        "numpy",
        lambda path: np.save(path, np.array([{}], object), allow_pickle=True),
        "not a flat array of integers",
    ),
    "bare, no width": ("bare", lambda path: None, "give --token-dtype"),
    "lone index": ("megatron", lambda path: path.unlink(), "an index, but some.bin is missing"),
}


def edit_idx(path: Path, change: Callable[[bytes], bytes]) -> None:
    index = path.with_suffix(".idx")
    index.write_bytes(change(index.read_bytes()))


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_says_what_is_wrong_and_is_a_counted_skip(tmp_path: Path, case: str) -> None:
    kind, damage, message = DAMAGE[case]
    path = MAKERS[kind][0](tmp_path)
    damage(path)
    path = path if path.exists() else path.with_suffix(".idx")
    with pytest.raises(TokenFileError, match=message):
        open_token_file(path)
    np.save(tmp_path / "sound.npy", np.array([1, 2, END], np.uint16))
    recipe = DataRecipe(
        (str(path), str(tmp_path / "sound.npy")), vocab_size=400, end_token=END, holdout_every=0
    )
    dataset = make_dataset(tmp_path / "ours", recipe, print)
    assert documents_of(dataset, "train") == [[1, 2, END]]
    assert dataset.manifest.skipped == {"no tokens": 1}


@pytest.mark.parametrize(("tokens", "worst"), [([1, 400], 400), ([-1, 3], -1)])
def test_a_token_outside_the_vocabulary_is_an_error(
    tmp_path: Path, tokens: list[int], worst: int
) -> None:
    np.save(tmp_path / "some.npy", np.array(tokens, np.int32))
    with pytest.raises(
        DataError, match=rf"some\.npy: token {worst} is outside the vocabulary of 400"
    ):
        make_dataset(
            tmp_path / "ours",
            DataRecipe((str(tmp_path / "some.npy"),), vocab_size=400, holdout_every=0),
            print,
        )
    assert not (tmp_path / "ours").exists()


def test_token_files_and_texts_do_not_mix(tmp_path: Path) -> None:
    numpy_file(tmp_path)
    (tmp_path / "some.txt").write_text("text")
    with pytest.raises(DataError, match="some sources are token files and others texts"):
        make_dataset(tmp_path / "ours", DataRecipe((str(tmp_path),), vocab_size=400), print)


def test_a_data_set_of_tokens_is_opened_again(tmp_path: Path) -> None:
    made = make_dataset(
        tmp_path / "ours",
        DataRecipe((str(numpy_file(tmp_path)),), vocab_size=400, end_token=END),
        print,
    )
    assert DataSet(tmp_path / "ours").manifest == made.manifest
