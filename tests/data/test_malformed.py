"""Malformed inputs: each gives a clear error or a counted skip with file and line; the rest is
taken, and no input is changed."""

import gzip
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from making_helpers import Make, lines, skips

from lather.data import documents
from lather.data.dataset import DataSet
from lather.errors import DataError

SOUND = [f"sound document {number}, which is taken whatever lies beside it" for number in range(6)]


def line(**record: Any) -> bytes:
    return lines(record).encode()


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


@pytest.fixture
def made(tmp_path: Path, make: Make) -> Callable[..., DataSet]:
    """Make a data set of a file with this content and a sound one beside it, which must be taken;
    the file must stay as it was."""

    def make_one(name: str, content: bytes, **options: Any) -> DataSet:
        file, beside = tmp_path / name, tmp_path / f"sound.{'txt' if '.txt' in name else 'jsonl'}"
        file.write_bytes(content)
        chats = (line(prompt="?", completion=text) for text in SOUND)
        rows = (line(text=text) for text in SOUND)
        sound = SOUND[0].encode() if beside.suffix == ".txt" else b"".join(rows)
        beside.write_bytes(b"".join(chats) if options else sound)
        dataset = make(file, beside, **options)
        assert file.read_bytes() == content
        count = 1 if beside.suffix == ".txt" else len(SOUND)
        assert dataset.manifest.splits["train"].documents >= count
        assert {skip[0] for skip in skips(dataset)} <= {str(file)}
        return dataset

    return make_one


def reasons(dataset: DataSet) -> list[tuple[int, str]]:
    return [(line, reason) for _, line, reason, _ in skips(dataset)]


Made = Callable[..., DataSet]


@pytest.mark.parametrize("case", JSONL)
def test_lines(made: Made, case: str) -> None:
    content, expected = JSONL[case]
    dataset = made("bad.jsonl", content)
    assert reasons(dataset) == expected
    good = content.replace(b"\r", b"").count(GOOD.strip()) * (case != "UTF-16")
    assert dataset.manifest.splits["train"].documents == len(SOUND) + good


@pytest.mark.parametrize("case", JSON)
def test_files_of_json(made: Made, case: str) -> None:
    content, expected = JSON[case]
    assert reasons(made("bad.json", content)) == expected


@pytest.mark.parametrize("case", CHAT)
def test_conversations(made: Made, case: str) -> None:
    content, expected = CHAT[case]
    assert reasons(made("bad.jsonl", content, chat=True)) == expected


def test_a_conversation_that_is_too_long_is_skipped(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MOST_CHARACTERS", 1000)
    texts = (line(prompt="?", completion="x" * length) for length in (1000, 500))
    many = line(messages=[{"role": "assistant", "content": "x"}] * 70_000)
    dataset = made("bad.jsonl", b"".join([*texts, many]), chat=True)
    assert reasons(dataset) == [(1, "too long"), (3, "too long")]


@pytest.mark.parametrize("case", TEXT)
def test_text_files(made: Made, case: str) -> None:
    content, expected, encodings = TEXT[case]
    dataset = made("bad.txt", content)
    assert reasons(dataset) == expected
    utf8 = 1 + encodings.get("utf-8", 0)
    assert dataset.manifest.encodings == {**encodings, "utf-8": utf8}


ROWS = b"".join(line(text=f"document {number} " * 30) for number in range(40))


def zstd_bytes(_: Path) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    content: bytes = zstandard.ZstdCompressor(write_checksum=True).compress(ROWS)
    return content


def parquet_bytes(tmp_path: Path) -> bytes:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [f"document {number} " * 30 for number in range(40)]})
    parquet.write_table(table, tmp_path / "whole.parquet", row_group_size=10)
    return (tmp_path / "whole.parquet").read_bytes()


KINDS: dict[str, Callable[[Path], bytes]] = {
    "jsonl": lambda _: ROWS,
    "jsonl.gz": lambda _: gzip.compress(ROWS),
    "jsonl.zst": zstd_bytes,
    "parquet": parquet_bytes,
    "txt": lambda _: ROWS,
}


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Damage the content: cut it, change a byte, insert bytes, zero a stretch or leave one out."""
    place, length = draw.randrange(1, len(content)), draw.randrange(1, 40)
    before, after = content[:place], content[place:]
    flipped = bytes([after[0] ^ 1 << draw.randrange(8)])
    ends = (
        b"",
        flipped + after[1:],
        draw.randbytes(length) + after,
        bytes(length) + after[length:],
        after[length:],
    )
    return before + draw.choice(ends)


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(x, marks=pytest.mark.grid) for x in range(10, 30))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_kind_is_an_error_or_a_counted_skip_or_harmless(
    made: Made, tmp_path: Path, kind: str, seed: int
) -> None:
    """No other exception is raised, and the file beside it is taken."""
    content = damaged(KINDS[kind](tmp_path), random.Random(f"{kind} {seed}"))
    dataset = made(f"bad.{kind}", content)
    assert all(number >= 0 and reason for number, reason in reasons(dataset))
    assert dataset.check() == []


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst"])
def test_a_compressed_file_that_ends_early_says_where(
    made: Made, tmp_path: Path, kind: str
) -> None:
    [(number, reason)] = reasons(made(f"bad.{kind}", KINDS[kind](tmp_path)[:-12]))
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
    tmp_path: Path, make: Make, case: str
) -> None:
    name, content, options, message = NOTHING[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        make(tmp_path / name, **options)
    assert not (tmp_path / "ours").exists()


RECIPES: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "no such file": (["absent.jsonl"], {}, "absent.jsonl: no such file or folder: give one"),
    "no such package": (["package:absent"], {}, "no package 'absent' is installed"),
    "no such pattern": (["."], {"pattern": "*.absent"}, r"no file matches the pattern '\*\.abs"),
    "no tokenizer": (["."], {"tokenizer": ""}, "neither tokenizer nor vocab_size is given"),
    "tokenizer absent": (["."], {"tokenizer": "x.json"}, "x.json: not a usable tokenizer"),
    "vocabulary too small": (["."], {"vocab_size": 299}, "has token 299, .* give at least 300"),
    "other end of text": (["."], {"end_of_text": "<eos>"}, "end_of_text = '<eos>' is not a token"),
    "no encoding": (["."], {"encoding": "utf-99"}, "encoding = 'utf-99' is not valid"),
    "one held out": (["."], {"holdout_every": 1}, "holdout_every = 1 is not valid"),
    "no sources": ([], {}, r"sources = \[\] is not valid"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_recipe_that_cannot_be_followed_names_the_field(
    tmp_path: Path, make: Make, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, options, message = RECIPES[case]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path / "texts")
    with pytest.raises(ValueError, match=message):
        make(*sources, **options)
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
    tmp_path: Path, tokenizer: Path, make: Make, most_bytes: int
) -> None:
    """No file may be longer than so many bytes, so that what is written first fits, and what
    follows does not."""
    shutil.copyfile(tokenizer, tmp_path / "tokenizer.json")
    source, script, ours = (tmp_path / name for name in ("some.jsonl", "full.py", "ours"))
    before = b"".join(line(text=f"document {number} " * 20) for number in range(400))
    source.write_bytes(before)
    script.write_text(FULL)
    command = [sys.executable, script, str(most_bytes), source, ours, *filter(None, sys.path)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert str(tmp_path) in done.stdout
    assert not ours.exists()
    assert source.read_bytes() == before
    dataset = make(source, tokenizer=str(tmp_path / "tokenizer.json"))
    assert dataset.manifest.splits["train"].documents == 400
