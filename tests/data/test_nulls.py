"""The same rows give the same records and tokens from JSON and from Arrow with its nulls."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from making_helpers import Make, lines

from lather.data.dataset import DataSet
from lather.data.recipe import DataRecipe
from lather.data.records import FilePart, Record, RecordReader

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": f"I call {name}.", "tool_calls": [call]}


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": value} for key, value in types.items()}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


ROWS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "Rain?"}, calling("weather", town="Ulm")],
        "tools": [tool("weather", town="string"), tool("person", first="string", second="string")],
    },
    {
        "messages": [
            {"role": "user", "content": "Who?", "name": "Ann"},
            calling(
                "person",
                first="A",
                second="B",
                more=[{"age": 3}, {"year": 4, "parts": {"deep": [{"x": 1}, {"y": 2}]}}],
            ),
            {"role": "tool", "content": "one", "tool_call_id": "7"},
            {"role": "assistant", "content": "That one."},
        ]
    },
    {"prompt": "2 + 2?", "completion": "4"},
    {
        "conversations": [{"from": "human", "value": "Hm?"}, {"from": "gpt", "value": "Yes."}],
        "tools": [],
    },
]
"""Rows without nulls, whose structs have other keys at every depth, and which lack columns."""


def as_jsonl(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, Any]:
    (folder / "a.jsonl").write_text(lines(*rows))
    return str(folder / "a.jsonl"), "jsonl"


def as_json(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, Any]:
    (folder / "a.json").write_text(json.dumps(rows, indent=1))
    return str(folder / "a.json"), "json"


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, Any]:
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    return str(folder / "a.parquet"), "parquet"


def as_saved(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, Any]:
    datasets = pytest.importorskip("datasets")
    as_parquet(folder, rows)
    datasets.Dataset(parquet.read_table(folder / "a.parquet")).save_to_disk(str(folder / "saved"))
    return str(folder / "saved"), "huggingface"


def loaded_from_json(folder: Path, rows: list[dict[str, Any]]) -> Any:
    """Newer versions of the library store objects with other keys as JSON, within structs."""
    datasets = pytest.importorskip("datasets")
    file, _ = as_jsonl(folder, rows)
    cache = str(folder / "cache")
    return datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)


def as_saved_from_json(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, Any]:
    loaded_from_json(folder, rows).save_to_disk(str(folder / "saved"))
    return str(folder / "saved"), "huggingface"


def as_parquet_from_json(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, Any]:
    loaded_from_json(folder, rows).to_parquet(str(folder / "a.parquet"))
    return str(folder / "a.parquet"), "parquet"


def as_hub(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, Any]:
    """Load a folder as the library loads a repository of the hub."""
    pytest.importorskip("datasets")
    (folder / "repository").mkdir()
    as_parquet(folder / "repository", rows)
    return f"hf:{folder / 'repository'}#train", "huggingface"


FORMS: dict[str, Callable[[Path, list[dict[str, Any]]], tuple[str, Any]]] = {
    "JSONL": as_jsonl,
    "JSON": as_json,
    "Parquet": as_parquet,
    "datasets": as_saved,
    "datasets of JSON": as_saved_from_json,
    "Parquet of JSON": as_parquet_from_json,
    "hub": as_hub,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def read(source: str, kind: Any, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    found = list(RecordReader(FilePart(source, kind, columns=columns)))
    assert all(isinstance(record, Record) for record in found), found
    return [record.content for record in found]  # type: ignore[misc,union-attr]


CHAT = DataRecipe(("x",), chat=True).columns


@pytest.mark.parametrize("form", FORMS)
def test_keys_that_a_row_does_not_have_do_not_appear(form: str, tmp_path: Path) -> None:
    found = read(*FORMS[form](tmp_path, ROWS), CHAT)
    columns = [{name: row[name] for name in row if row[name] is not None} for row in found]
    assert columns == ROWS


@pytest.fixture
def with_template(make: Make, tokenizer: Path, tmp_path: Path) -> Callable[..., DataSet]:
    """Make a data set of conversations with a chat template."""

    def make_one(template: str, source: str, name: str) -> DataSet:
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        shutil.copyfile(tokenizer, model / "tokenizer.json")
        (model / "chat_template.jinja").write_text(template)
        dataset = make(source, name=name, chat=True, tokenizer=str(model))
        assert dataset.manifest.skipped == {}
        return dataset

    return make_one


SORTING = (
    "{{ tools | tojson(sort_keys=true) }}\n"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.tool_calls is defined %}"
    "{{ message.tool_calls | tojson(sort_keys=true) }}{% endif %}"
    "{% if 'name' in message %}({{ message.name }}){% endif %}</s>\n{% endfor %}"
)
"""A template that sorts keys, because Arrow does not keep the order of the keys of a row."""


@pytest.mark.parametrize("form", FORMS)
def test_chat_templates_see_the_same_conversations(
    form: str, tmp_path: Path, with_template: Callable[..., DataSet]
) -> None:
    source, _ = FORMS[form](tmp_path, ROWS)
    dataset = with_template(SORTING, source, "theirs")
    assert dataset.manifest.splits["train"].documents == len(ROWS)
    (tmp_path / "plain").mkdir()
    plain = with_template(SORTING, as_jsonl(tmp_path / "plain", ROWS)[0], "ours")
    assert dataset.manifest.identity == plain.manifest.identity


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
WITH_NULLS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "Rain?", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "yes", "tool_calls": None},
            {"role": "assistant", "content": "It rains.", "tool_calls": None},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "tool_calls": [CALL]},
        ]
    },
]
"""Messages that say null where others lack the key."""
SHOWING = {
    "if there are some": ("{% if m.content %}", "{% if m.tool_calls %}"),
    "if they are defined": ("{% if m.content is not none %}", "{% if m.tool_calls is defined %}"),
}


@pytest.mark.parametrize("conditions", SHOWING)
def test_a_null_of_a_message_is_a_key_that_it_lacks_in_json_as_well(
    conditions: str, tmp_path: Path, with_template: Callable[..., DataSet]
) -> None:
    has_content, has_calls = SHOWING[conditions]
    template = (
        "{% for m in messages %}<{{ m.role }}>\n" + has_content + "{{ m.content }}{% endif %}"
        f"{has_calls}{{% for c in m.tool_calls %}}<call>{{{{ c.function | tojson }}}}</call>"
        "{% endfor %}{% endif %}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    )
    identities = set()
    for form, write in FORMS.items():
        (tmp_path / form).mkdir()
        dataset = with_template(template, write(tmp_path / form, WITH_NULLS)[0], f"{form}/data")
        assert dataset.manifest.splits["train"].documents == 2
        identities.add(dataset.manifest.identity)
    assert len(identities) == 1


def test_a_null_of_a_column_an_item_and_a_map_stays_and_that_of_a_struct_does_not(
    tmp_path: Path,
) -> None:
    struct = pyarrow.struct(
        [
            ("a", pyarrow.list_(pyarrow.int64())),
            ("b", pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        ]
    )
    lists = [pyarrow.large_list(struct), pyarrow.list_(struct, 2)]
    values = [
        [None, {"a": [1, None], "b": None}],
        None,
        [{"a": None, "b": [("x", 1), ("none", None)]}, {"a": None, "b": []}],
    ]
    expected = [[None, {"a": [1, None]}], None, [{"b": {"x": 1, "none": None}}, {"b": {}}]]
    for number, kind in enumerate(lists):
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.table({"text": pyarrow.array(values, kind)}), file)
        assert read(str(file), "parquet", ("text",)) == [{"text": value} for value in expected]


def test_keys_of_a_map_that_are_not_text_are_text_as_in_json(tmp_path: Path) -> None:
    column = pyarrow.array(
        [[(1, [{"x": 2, "y": None}])]],
        pyarrow.map_(pyarrow.int64(), pyarrow.list_(pyarrow.struct([("x", "i8"), ("y", "i8")]))),
    )
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert read(str(tmp_path / "a.parquet"), "parquet", ("text",)) == [{"text": {"1": [{"x": 2}]}}]


def test_a_null_that_json_says_stays_also_where_arrow_stores_json(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"a": value}]}]}
        for value in ({"b": None}, {"b": [1]}, {"c": "d"})
    ]
    for form in ("JSONL", "datasets of JSON", "Parquet of JSON"):
        (tmp_path / form).mkdir()
        assert read(*FORMS[form](tmp_path / form, rows), ("messages",)) == rows


def test_a_text_that_is_null_is_not_a_text_that_is_absent(tmp_path: Path, make: Make) -> None:
    parquet.write_table(pyarrow.table({"text": ["one", None]}), tmp_path / "a.parquet")
    assert make(tmp_path / "a.parquet").manifest.skipped == {"'text' is null": 1}
