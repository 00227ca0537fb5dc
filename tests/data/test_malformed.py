"""Malformed inputs: each gives a clear error or a counted skip with file and line; the rest is
taken, and no input is changed."""

import gzip
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lather.data import documents
from lather.data.dataset import SKIPPED, DataSet
from lather.data.documents import train_tokenizer
from lather.data.making import make_dataset
from lather.data.recipe import END_OF_TEXT, DataRecipe
from lather.errors import DataError

SOUND = [f"sound document {number}, which is taken whatever lies beside it" for number in range(6)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(SOUND), 300, END_OF_TEXT).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def line(**record: Any) -> bytes:
    return json.dumps(record).encode() + b"\n"


GOOD = line(text="good")
JSONL: dict[str, tuple[bytes, list[tuple[int, str]]]] = {
    "broken line": (GOOD + b'{"text": "no end\n' + GOOD, [(2, "broken JSON")]),
    "half a line at the end": (GOOD + b'{"text": "ha', [(2, "broken JSON")]),
    "not JSON at all": (b"one\ntwo\n", [(1, "broken JSON"), (2, "broken JSON")]),
    "bad UTF-8": (GOOD + b'{"text": "\xff\xfe\xfa"}\n' + GOOD, [(2, "not UTF-8")]),
    "Latin-1": (GOOD + '{"text": "naïve café"}\n'.encode("latin-1"), [(2, "not UTF-8")]),
    "lone surrogate": (GOOD + b'{"text": "\\ud800"}\n', [(2, "not valid Unicode")]),
    "null": (line(text=None) + GOOD, [(1, "'text' is null")]),
    "number": (line(text=3) + GOOD, [(1, "'text' is no text")]),
    "list": (line(text=["a"]) + GOOD, [(1, "'text' is no text")]),
    "other field": (line(content="x") + GOOD, [(1, "no field 'text'")]),
    "no field": (b"{}\n" + GOOD, [(1, "no field 'text'")]),
    "empty text": (line(text="") + line(text=" \n\t") + GOOD, [(1, "empty"), (2, "empty")]),
    "a list of records": (b"[1, 2]\n" + GOOD, [(1, "not a JSON object")]),
    "a string": (b'"text"\n' + GOOD, [(1, "not a JSON object")]),
    "NaN": (b"NaN\n" + GOOD, [(1, "not a JSON object")]),
    "nested too deeply": (b"[" * 200_000 + b"\n" + GOOD, [(1, "broken JSON")]),
    "zero bytes": (b"\0\0\0\n" + GOOD, [(1, "broken JSON")]),
    "a huge number": (b'{"text": ' + b"9" * 5000 + b"}\n" + GOOD, [(1, "broken JSON")]),
    "blank lines": (b"\n\n  \n" + GOOD + b"\n", []),
    "CRLF": (GOOD.replace(b"\n", b"\r\n") * 2, []),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD, []),
    "UTF-16": (GOOD.decode().encode("utf-16"), [(0, "not UTF-8")]),
    "no last newline": (GOOD + GOOD.strip(), []),
    "nothing": (b"", []),
    "Parquet": (b"PAR1" + bytes(100), [(0, "no text")]),
    "gzip without the name": (gzip.compress(GOOD), [(0, "no text")]),
    "zip": (b"PK\x03\x04" + bytes(50), [(0, "no text")]),
}
JSON: dict[str, tuple[bytes, list[tuple[int, str]]]] = {
    "items that are none": (
        b'[1, {"text": "good"}, null, {"text": 3}]',
        [(1, "not a JSON object"), (3, "not a JSON object"), (4, "'text' is no text")],
    ),
    "a list that ends early": (b'[{"text": "good"}, {"te', [(0, "broken JSON")]),
    "a number": (b"7", [(1, "not a JSON object")]),
    "a broken list with a byte order mark": (b"\xef\xbb\xbf[{]", [(0, "broken JSON")]),
    "nested too deeply": (b"[" * 200_000, [(0, "broken JSON")]),
    "Latin-1": ('[{"text": "naïve"}]'.encode("latin-1"), [(0, "broken JSON")]),
    "no JSON": (b"hello\n", [(1, "broken JSON")]),
    "nothing": (b"", []),
    "Parquet": (b"PAR1" + bytes(100), [(0, "no text")]),
}
CHAT: dict[str, tuple[bytes, list[tuple[int, str]]]] = {
    name: (line(**record), [(1, "no conversation")])
    for name, record in {
        "no messages": {"text": "x"},
        "no list": {"messages": "hello"},
        "empty list": {"messages": []},
        "null": {"messages": None},
        "a message that is text": {"messages": ["hello"]},
        "no role": {"messages": [{"content": "hello"}]},
        "no content": {"messages": [{"role": "user"}]},
        "content null": {"messages": [{"role": "assistant", "content": None}]},
        "content a number": {"messages": [{"role": "user", "content": 4}]},
        "role null": {"messages": [{"role": None, "content": "x"}]},
        "no answer": {"messages": [{"role": "user", "content": "hello"}]},
        "prompt alone": {"prompt": "hello"},
        "prompt a number": {"prompt": 3, "completion": "x"},
        "completion null": {"prompt": "hello", "completion": None},
        "tools a number": {"prompt": "hello", "completion": "x", "tools": 3},
        "tools no JSON": {"prompt": "hello", "completion": "x", "tools": "[{"},
        "tools nested too deeply": {"prompt": "hello", "completion": "x", "tools": "[" * 200_000},
    }.items()
} | {"broken line": (b'{"messages": [\n', [(1, "broken JSON")])}
TEXT: dict[str, tuple[bytes, list[tuple[int, str]], dict[str, int]]] = {
    "Latin-1": ("naïve café".encode("latin-1"), [], {"cp1252": 1}),
    "Windows-1252": ("“quoted”".encode("cp1252"), [], {"cp1252": 1}),
    "undefined in both": (b"\x81\x8d then text", [], {"cp1252": 1}),
    "UTF-8 with a byte of something else": (
        "naïve café, 日本語".encode() + b" \xe9t\xc3\xa9",
        [],
        {"utf-8 (damaged)": 1},
    ),
    "Latin-1 with a pair that UTF-8 has": ("é à ü ï ê Ã©".encode("latin-1"), [], {"cp1252": 1}),
    "UTF-16": ("naïve".encode("utf-16"), [], {"utf-16-le": 1}),
    "UTF-32": ("naïve".encode("utf-32"), [], {"utf-32-le": 1}),
    "UTF-8 with mark": ("naïve".encode("utf-8-sig"), [], {"utf-8": 1}),
    "UTF-16 cut": ("naïve".encode("utf-16")[:-1], [(1, "no text")], {}),
    "binary": (b"\x7fELF\0\0\1" + bytes(range(256)), [(1, "no text")], {}),
    "zero bytes": (bytes(10), [(1, "no text")], {}),
    "empty": (b"", [(1, "empty")], {}),
    "blank": (b" \n\t\n", [(1, "empty")], {}),
    "Parquet": (b"PAR1xxxx", [(0, "no text")], {}),
    "gzip": (gzip.compress(b"text"), [(0, "no text")], {}),
    "PDF": (b"%PDF-1.7 ...", [(0, "no text")], {}),
}


def made(tmp_path: Path, tokenizer: Path, file: Path, **options: Any) -> DataSet:
    """Make a data set of the file and a sound one beside it, which must be taken; the file must
    stay as it was."""
    before = file.read_bytes()
    beside = tmp_path / (
        "sound.jsonl" if options.get("chat") or file.suffix != ".txt" else "sound.txt"
    )
    if options.get("chat"):
        beside.write_bytes(b"".join(line(prompt="?", completion=text) for text in SOUND))
    elif beside.suffix == ".jsonl":
        beside.write_bytes(b"".join(line(text=text) for text in SOUND))
    else:
        beside.write_text(SOUND[0])
    recipe = DataRecipe(
        (str(file), str(beside)), tokenizer=str(tokenizer), holdout_every=0, **options
    )
    try:
        dataset = make_dataset(tmp_path / "ours", recipe, print, 1)
    finally:
        assert file.read_bytes() == before
    assert dataset.manifest.splits["train"].documents >= (
        1 if beside.suffix == ".txt" else len(SOUND)
    )
    return dataset


def skips(dataset: DataSet, file: Path) -> list[tuple[int, str]]:
    rows = [json.loads(row) for row in (dataset.folder / SKIPPED).read_text("utf-8").splitlines()]
    assert {row["file"] for row in rows} <= {str(file)}
    assert sum(dataset.manifest.skipped.values()) == len(rows)
    return [(row["line"], row["reason"]) for row in rows]


@pytest.mark.parametrize("case", JSONL)
def test_lines(tmp_path: Path, tokenizer: Path, case: str) -> None:
    content, expected = JSONL[case]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    dataset = made(tmp_path, tokenizer, file)
    assert skips(dataset, file) == expected
    assert dataset.manifest.splits["train"].documents == len(SOUND) + content.replace(
        b"\r", b""
    ).count(GOOD.strip()) * (case != "UTF-16")


@pytest.mark.parametrize("case", JSON)
def test_files_of_json(tmp_path: Path, tokenizer: Path, case: str) -> None:
    content, expected = JSON[case]
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    assert skips(made(tmp_path, tokenizer, file), file) == expected


def test_a_conversation_that_is_too_long_is_skipped(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MOST_CHARACTERS", 1000)
    file = tmp_path / "bad.jsonl"
    many = [{"role": "assistant", "content": "x"}] * 70_000
    file.write_bytes(
        line(prompt="?", completion="x" * 1000)
        + line(prompt="?", completion="x" * 500)
        + line(messages=many)
    )
    assert skips(made(tmp_path, tokenizer, file, chat=True), file) == [
        (1, "too long"),
        (3, "too long"),
    ]


@pytest.mark.parametrize("case", CHAT)
def test_conversations(tmp_path: Path, tokenizer: Path, case: str) -> None:
    content, expected = CHAT[case]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    assert skips(made(tmp_path, tokenizer, file, chat=True), file) == expected


@pytest.mark.parametrize("case", TEXT)
def test_text_files(tmp_path: Path, tokenizer: Path, case: str) -> None:
    content, expected, encodings = TEXT[case]
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    dataset = made(tmp_path, tokenizer, file)
    assert skips(dataset, file) == expected
    utf8 = encodings.pop("utf-8", 0) if encodings else 0
    assert dataset.manifest.encodings == {"utf-8": 1 + utf8, **encodings}


def jsonl_bytes(tmp_path: Path) -> bytes:
    return b"".join(line(text=f"document {number} " * 30) for number in range(40))


def gzip_bytes(tmp_path: Path) -> bytes:
    return gzip.compress(jsonl_bytes(tmp_path))


def zstd_bytes(tmp_path: Path) -> bytes:
    return (
        pytest.importorskip("zstandard")
        .ZstdCompressor(write_checksum=True)
        .compress(jsonl_bytes(tmp_path))
    )  # type: ignore[no-any-return]


def parquet_bytes(tmp_path: Path) -> bytes:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [f"document {number} " * 30 for number in range(40)]})
    parquet.write_table(table, tmp_path / "whole.parquet", row_group_size=10)
    return (tmp_path / "whole.parquet").read_bytes()


KINDS: dict[str, Callable[[Path], bytes]] = {
    "jsonl": jsonl_bytes,
    "jsonl.gz": gzip_bytes,
    "jsonl.zst": zstd_bytes,
    "parquet": parquet_bytes,
    "txt": jsonl_bytes,
}


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Damage the content: cut it, change a byte, insert bytes, zero a stretch or leave one out."""
    place, length = draw.randrange(1, len(content)), draw.randrange(1, 40)
    return draw.choice(
        [
            content[:place],
            content[:place]
            + bytes([content[place] ^ 1 << draw.randrange(8)])
            + content[place + 1 :],
            content[:place] + draw.randbytes(length) + content[place:],
            content[:place] + bytes(length) + content[place + length :],
            content[:place] + content[place + length :],
        ]
    )


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_kind_is_an_error_or_a_counted_skip_or_harmless(
    tmp_path: Path, tokenizer: Path, kind: str, seed: int
) -> None:
    """No other exception is raised, and the file beside it is taken."""
    file = tmp_path / f"bad.{kind}"
    file.write_bytes(damaged(KINDS[kind](tmp_path), random.Random(f"{kind} {seed}")))
    dataset = made(tmp_path, tokenizer, file)
    assert all(number >= 0 and reason for number, reason in skips(dataset, file))
    assert dataset.check() == []


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst"])
def test_a_compressed_file_that_ends_early_says_where(
    tmp_path: Path, tokenizer: Path, kind: str
) -> None:
    file = tmp_path / f"bad.{kind}"
    file.write_bytes(KINDS[kind](tmp_path)[:-12])
    [(number, reason)] = skips(made(tmp_path, tokenizer, file), file)
    assert reason == "damaged, or ends early"
    assert number >= 1


NOTHING = {
    "wrong column": (
        "some.jsonl",
        line(content="x") * 3,
        {},
        r"no document can be trained on \(3 x no field 'text'\): .*some.jsonl: it has content; ",
    ),
    "chats as texts": ("some.jsonl", line(messages=[]), {}, r"1 x no field 'text'"),
    "Parquet called text": ("some.txt", b"PAR1" + bytes(9), {}, r"1 x no text"),
    "text called Parquet": ("some.parquet", b"plain text", {}, r"1 x damaged, or ends early"),
    "text called gzip": ("some.jsonl.gz", b"plain text", {}, r"1 x damaged, or ends early"),
    "empty file": ("some.jsonl", b"", {}, r"no document can be trained on \(there is none\)"),
    "wrong encoding": ("some.txt", b"\xff\xff", {"encoding": "utf-8"}, r"1 x no text"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_to_train_on_is_an_error_with_the_reasons(
    tmp_path: Path, tokenizer: Path, case: str
) -> None:
    name, content, options, message = NOTHING[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        make_dataset(
            tmp_path / "ours",
            DataRecipe((str(tmp_path / name),), tokenizer=str(tokenizer), **options),
            print,
            1,
        )
    assert not (tmp_path / "ours").exists()


RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "no such file": (
        {"sources": ("absent.jsonl",)},
        "absent.jsonl: no such file or folder: give one",
    ),
    "no such package": ({"sources": ("package:absent",)}, "no package 'absent' is installed"),
    "no such pattern": ({"pattern": "*.absent"}, r"no file matches the pattern '\*\.absent'"),
    "no tokenizer": ({"tokenizer": ""}, "neither tokenizer nor vocab_size is given"),
    "tokenizer absent": ({"tokenizer": "absent.json"}, "absent.json: not a usable tokenizer"),
    "vocabulary too small": (
        {"vocab_size": 299},
        "has token 299, but vocab_size is 299: give at least 300",
    ),
    "other end of text": ({"end_of_text": "<eos>"}, "end_of_text = '<eos>' is not a token of"),
    "no encoding": ({"encoding": "utf-99"}, "encoding = 'utf-99' is not valid"),
    "one held out": ({"holdout_every": 1}, "holdout_every = 1 is not valid"),
    "no sources": ({"sources": ()}, r"sources = \[\] is not valid"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_recipe_that_cannot_be_followed_names_the_field(
    tmp_path: Path, tokenizer: Path, case: str
) -> None:
    change, message = RECIPES[case]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=message):
        make_dataset(
            tmp_path / "ours",
            DataRecipe(
                **{"sources": (str(tmp_path / "texts"),), "tokenizer": str(tokenizer), **change}
            ),
            print,
            1,
        )
    assert not (tmp_path / "ours").exists()


# --- a disk that is full --------------------------------------------------------------------------

FULL = """
import resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[4:]
from lather.data.making import make_dataset
from lather.data.recipe import DataRecipe
from lather.errors import DataError, UserError
if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), hard))
    tokenizer = str(Path(sys.argv[2]).parent / "tokenizer.json")
    recipe = DataRecipe((sys.argv[2],), tokenizer=tokenizer, holdout_every=0)
    try:
        make_dataset(Path(sys.argv[3]), recipe, print, 1)
    except (UserError, OSError) as error:
        print(error)
        sys.exit(3)
"""


@pytest.mark.parametrize("most_bytes", [0, 100, 700, 3_000, 9_000, 30_000])
def test_no_room_at_any_moment_is_an_error_and_the_same_command_goes_on(
    tmp_path: Path, tokenizer: Path, most_bytes: int
) -> None:
    """No file may be longer than so many bytes, so that what is written first fits, and what
    follows does not."""
    shutil.copyfile(tokenizer, tmp_path / "tokenizer.json")
    source, script = tmp_path / "some.jsonl", tmp_path / "full.py"
    source.write_bytes(b"".join(line(text=f"document {number} " * 20) for number in range(400)))
    script.write_text(FULL)
    before = source.read_bytes()
    command = [
        sys.executable,
        str(script),
        str(most_bytes),
        str(source),
        str(tmp_path / "ours"),
        *filter(None, sys.path),
    ]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert str(tmp_path) in done.stdout
    assert not (tmp_path / "ours").exists()
    assert source.read_bytes() == before
    recipe = DataRecipe((str(source),), tokenizer=str(tmp_path / "tokenizer.json"), holdout_every=0)
    assert (
        make_dataset(tmp_path / "ours", recipe, print, 1).manifest.splits["train"].documents == 400
    )
