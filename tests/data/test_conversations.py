"""Records of conversations: shapes, marks of what is learned, and what a template leaves out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import PUBLISHED
from making_helpers import Make, documents_of, learned_of, lines
from tokenizers import AddedToken

from lather.data.chat import CHATML, ChatTemplate
from lather.data.conversations import ChatError, is_learned, messages_of, tools_of
from lather.data.dataset import NOTES, DataSet
from lather.data.documents import load_tokenizer, train_tokenizer
from lather.data.recipe import END_OF_TEXT, DataRecipe

ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"name": "weather", "arguments": {"town": "Ulm"}}
Made = Callable[..., DataSet]


@pytest.fixture
def made(tmp_path: Path, make: Make) -> Made:
    """Make a data set of records with a template, whose eos_token is <eos>."""

    def make_one(records: list[Any], source: str = CHATML, end: str = END_OF_TEXT) -> DataSet:
        tokenizer = train_tokenizer(iter(["x"]), 300, END_OF_TEXT)
        names = ("<eos>", "<|im_end|>")
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        settings = {"chat_template": source, "eos_token": "<eos>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "chats.jsonl").write_text(lines(*records))
        return make(tmp_path / "chats.jsonl", chat=True, tokenizer=str(tmp_path), end_of_text=end)

    return make_one


def rows_of(dataset: DataSet) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (dataset.folder / NOTES).read_text("utf-8").splitlines()]


def learned_texts(dataset: DataSet) -> list[str]:
    """Return the learned text of every document."""
    tokenizer = load_tokenizer(dataset.folder / "tokenizer.json", "")
    reader, texts, start = dataset.split("train"), [], 0
    for document in documents_of(dataset):
        chosen = np.array(document)[reader.learned(start, start + len(document))]
        texts.append(tokenizer.decode(chosen.tolist(), skip_special_tokens=False))
        start += len(document)
    return texts


PAIR = [("user", "a"), ("assistant", "b")]
PROMPTED = {"prompt": "a", "completion": "b"}
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
SHAPES: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "messages": ({"messages": [ASKED, ANSWERED]}, PAIR),
    "ShareGPT": ({"conversations": SHARED}, PAIR),
    "prompt and completion": ({**PROMPTED, "other": 3}, PAIR),
    "lists": ({"prompt": [ASKED], "completion": [ANSWERED]}, PAIR),
    "system beside ShareGPT": ({"system": "s", "conversations": SHARED}, [("system", "s"), *PAIR]),
    "system beside messages": (
        {"system": "s", "messages": [ASKED, ANSWERED]},
        [("system", "s"), *PAIR],
    ),
    "system beside prompt": ({"system": "s", **PROMPTED}, [("system", "s"), *PAIR]),
    "the same system twice": (
        {"system": "s", "messages": [{"role": "system", "content": "s"}, ASKED, ANSWERED]},
        [("system", "s"), *PAIR],
    ),
    "nulls": ({"messages": None, "system": None, **PROMPTED, "tools": None}, PAIR),
    "Alpaca": (
        {"instruction": "i", "input": "a", "output": "b"},
        [("user", "i\na"), ("assistant", "b")],
    ),
    "Alpaca with a history and no input": (
        {"instruction": "a", "input": "", "output": "b", "history": [["q", "r"]], "system": "s"},
        [("system", "s"), ("user", "q"), ("assistant", "r"), *PAIR],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_records(name: str) -> None:
    record, expected = SHAPES[name]
    messages = messages_of(record)
    assert [(message["role"], message.get("content")) for message in messages] == expected


def test_calls_of_sharegpt_are_calls_of_the_assistant() -> None:
    turns = {
        "human": "a",
        "function_call": json.dumps(CALL),
        "tool_call": json.dumps([CALL, CALL]),
        "observation": "9",
        "gpt": "b",
    }
    record = {"conversations": [{"from": role, "value": text} for role, text in turns.items()]}
    messages = messages_of(record)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": CALL}] * 3
    assert len(learned_of(ChatTemplate(PUBLISHED["Qwen2.5"].source, {}), messages)) == 2


def test_calls_in_json_are_calls_and_need_no_content() -> None:
    calls = [{"type": "function", "function": CALL}]
    for given in (calls, json.dumps(calls)):
        record = {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": given}]}
        assert messages_of(record)[1]["tool_calls"] == calls


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another system": (
        {"system": "s", "messages": [{"role": "system", "content": "t"}, ASKED, ANSWERED]},
        "a field system and another system message",
    ),
    "system a number": ({"system": 3, "messages": [ASKED]}, "system is int, not text"),
    "a call that is no JSON": (
        {"conversations": [{"from": "function_call", "value": "weather(Ulm)"}]},
        "message 0 of role function_call is not a call in JSON",
    ),
    "calls that are no JSON": (
        {"messages": [ASKED, {"role": "assistant", "tool_calls": "weather(Ulm)"}]},
        "message 1 has tool_calls that are no JSON",
    ),
    "calls that are no list": (
        {"messages": [ASKED, {"role": "assistant", "tool_calls": CALL}]},
        "message 1 has tool_calls that are no list of calls",
    ),
    "a call without a name": (
        {"messages": [ASKED, {**ANSWERED, "tool_calls": [{"function": {"arguments": {}}}]}]},
        "message 1 has a call without a name",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        "message 0 has a part of type image: only texts are read",
    ),
    "no message": ({"system": "s", "prompt": [], "completion": []}, "prompt is list, not text or"),
    "a history that is none": (
        {"instruction": "a", "output": "b", "history": "q"},
        "history is not a list of pairs",
    ),
    "an output that is no text": ({"instruction": "a", "output": 3}, "output is int, not text"),
    "other fields": ({"question": "a"}, "neither messages nor prompt .* but question"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_the_reason(name: str) -> None:
    record, words = REFUSED[name]
    with pytest.raises(ChatError, match=words):
        messages_of(record)


def test_functions_are_tools() -> None:
    assert tools_of({"functions": [CALL]}) == [{"type": "function", "function": CALL}]
    assert tools_of({"functions": "[]", "tools": [CALL]}) == [CALL]


UNLEARNED = [
    {"weight": 0},
    {"weight": 0.0},
    {"loss_weight": 0},
    {"loss_scale": 0.0},
    {"loss": False},
    {"loss_mask": 0},
    {"train": False},
    {"training": False},
    {"masked": True},
]


@pytest.mark.parametrize("mark", UNLEARNED, ids=["-".join(mark) for mark in UNLEARNED])
@pytest.mark.parametrize("template", ["Qwen2.5", "SmolLM3"])
def test_marks_of_what_is_not_learned_are_obeyed(mark: dict[str, Any], template: str) -> None:
    [(name, value)] = mark.items()
    talk = [ASKED, {**ANSWERED, **mark}, ASKED, {**ANSWERED, name: not value}, ASKED, ANSWERED]
    formatted = ChatTemplate(PUBLISHED[template].source, {}).format(talk)
    text, spans = formatted.text, formatted.answers
    assert [text[start:].split("<")[0] for start, _ in spans] == ["b", "b"]
    assert spans[0][0] > text.index("b<|im_end|>") + 1


def test_marks_that_are_not_valid_are_refused() -> None:
    for mark, words in (
        ({"weight": 0.5}, "message 1 has weight = 0.5: give 0 or 1"),
        ({"train": "no"}, "message 1 has train = 'no'"),
        ({"train_detail": [{"begin_offset": 0}]}, "message 1 has train_detail, which is not read"),
    ):
        with pytest.raises(ChatError, match=words):
            ChatTemplate(CHATML, {}).format([ASKED, {**ANSWERED, **mark}])
    assert is_learned({"weight": None}, 0) is None
    with pytest.raises(ChatError, match="every answer is marked as not learned"):
        ChatTemplate(CHATML, {}).format([ASKED, {**ANSWERED, "weight": 0}])


USERS_ALONE = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_parts_that_the_template_does_not_show_are_noted_with_file_and_line(
    made: Made, tmp_path: Path
) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]}
    records = [
        {"messages": [ASKED, ANSWERED]},
        {"messages": [{"role": "system", "content": "s"}, ASKED, ANSWERED]},
        {"messages": [ASKED, call, {"role": "tool", "content": "9"}, ANSWERED], "tools": [CALL]},
        {"messages": [ASKED, {**ANSWERED, "reasoning_content": "hm"}]},
        {"messages": [{**ASKED, "train": True}, ANSWERED]},
        {"messages": [ASKED, call]},
    ]
    dataset = made(records, USERS_ALONE)
    rows = rows_of(dataset)
    assert {row["file"] for row in rows} == {str(tmp_path / "chats.jsonl")}
    shown = "by the chat template"
    assert [(row["line"], row["reason"], row["detail"]) for row in rows] == [
        (2, f"messages of role 'system' are not shown {shown}", "message 0"),
        (3, f"tool_calls of role 'assistant' are not all shown {shown}", "message 1"),
        (3, f"messages of role 'tool' are not shown {shown}", "message 2"),
        (3, f"tools are not shown {shown}", "1 tools"),
        (4, f"reasoning of role 'assistant' is not shown {shown}", "message 1"),
        (5, "a mark to learn role 'user' is not obeyed", "message 0"),
    ]
    assert sum(dataset.manifest.notes.values()) == len(rows)
    assert dataset.manifest.skipped == {"no conversation": 1}
    assert learned_texts(dataset) == ["b<eos>" + END_OF_TEXT] * 5


def test_a_data_set_that_lacks_nothing_has_no_notes(made: Made) -> None:
    dataset = made([{"messages": [ASKED, ANSWERED]}])
    assert not (dataset.folder / NOTES).exists()
    assert dataset.manifest.notes == {}


def test_fields_of_the_conversation_that_are_not_read_are_noted(made: Made) -> None:
    talk = {"messages": [ASKED, ANSWERED], "id": 3, "videos": [], "documents": None}
    records = [talk, {**talk, "images": ["a.png"]}, {**talk, "chat_template_kwargs": {"think": 0}}]
    dataset = made(records)
    assert dataset.manifest.notes == {
        "field 'chat_template_kwargs' is not read": 1,
        "field 'images' is not read": 1,
    }
    assert [row["line"] for row in rows_of(dataset)] == [2, 3]
    columns = DataRecipe(("a",), chat=True).columns
    assert {"images", "documents", "chat_template_kwargs"} <= set(columns)


def test_one_call_of_several_that_is_not_shown_is_noted() -> None:
    calls = [{"type": "function", "function": {**CALL, "name": name}} for name in ("one", "two")]
    talk = [ASKED, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "9"}]
    formatted = ChatTemplate(PUBLISHED["gpt-oss"].source, {}).format([*talk, ANSWERED])
    assert "two" not in formatted.text
    kind = "tool_calls of role 'assistant' are not all shown by the chat template"
    assert formatted.notes == [(kind, "message 1")]
    assert len(formatted.answers) == 1


ENDS = {
    "written by the template": ("{{ eos_token }}", "<eos>", ["b<eos>"]),
    "with white space after it": ("{{ eos_token }}{{ '\\n' }}", "<eos>", ["b<eos>\n"]),
    "another": ("{{ eos_token }}", END_OF_TEXT, ["b<eos>" + END_OF_TEXT]),
    "not written": ("", "<eos>", ["b<eos>"]),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_document_has_one_learned_end(made: Made, tmp_path: Path, name: str) -> None:
    closing, end, expected = ENDS[name]
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + closing + "{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    dataset = made([{"messages": [ASKED, ANSWERED]}] * 2, source, end)
    assert learned_texts(dataset) == expected * 2
    number = load_tokenizer(tmp_path / "tokenizer.json", "").token_to_id(end)
    asked = 1 if "eos" in closing and end == "<eos>" else 0  # the end of the question
    assert [tokens.count(number) for tokens in documents_of(dataset)] == [1 + asked] * 2
