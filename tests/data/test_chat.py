"""Conversations are rendered as transformers renders them, and just the assistant's answers are
learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import answers
from making_helpers import documents_of

from lather.data.chat import CHATML, ChatTemplate
from lather.data.conversations import ChatError, messages_of, tools_of
from lather.data.documents import load_tokenizer, train_tokenizer
from lather.data.making import make_dataset
from lather.data.recipe import END_OF_TEXT, DataRecipe
from lather.errors import DataError

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6, naïve one"},
]
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ "
    "message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}{% endif "
    "%}{% endfor %}"
)
TEMPLATES = {
    "ChatML": (CHATML, {}),
    "Llama 2": (LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}),
    "with blocks": (
        "{% for message in messages %}\n    {%- if loop.first %}\n    {{- '>>' }}\n    {%- endif "
        "%}\n"
        "    {{- message['role'] | upper + ': ' + message['content'] + '\\n' }}\n{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'ASSISTANT: ' }}{%- endif %}",
        {},
    ),
    "trims": (
        "{% for message in messages %}{{ message.role }}|{{ message.content | trim }}|{% endfor %}",
        {},
    ),
}


def learned_text(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[str]:
    text, spans = answers(template, messages)
    return [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_what_transformers_makes_of_it(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source, tokens = TEMPLATES[name]
    train_tokenizer(iter(["x"]), 300, END_OF_TEXT).save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=source, **tokens
    )
    ours = ChatTemplate(source, tokens)
    for asking in (False, True):
        expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=asking)
        assert ours.render(TALK, asking=asking) == expected


def test_the_answers_and_what_ends_them_are_learned() -> None:
    template = ChatTemplate(CHATML, {})
    assert learned_text(template, TALK) == ["4<|im_end|>\n", "6, naïve one<|im_end|>\n"]
    assert learned_text(ChatTemplate(*TEMPLATES["Llama 2"]), TALK) == [
        " 4</s>",
        " 6, naïve one</s>",
    ]
    assert learned_text(ChatTemplate(*TEMPLATES["trims"]), TALK) == [
        "assistant|4|",
        "assistant|6, naïve one|",
    ]


LIKE_QWEN3 = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content.split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIKE_R1 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}<User>{{ "
    "message.content }}"
    "{% elif message.role == 'assistant' %}<Assistant>{{ message.content.split('</think>')[-1] "
    "}}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
)
THOUGHTS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>a</think>ONE "},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "TWO\n"},
]


def test_templates_that_show_answers_otherwise_when_they_are_the_last() -> None:
    """The text as a whole decides what is learned."""
    assert learned_text(ChatTemplate(LIKE_QWEN3, {}), THOUGHTS) == [
        "ONE<|im_end|>\n",
        "<think>\n\n</think>\n\nTWO<|im_end|>\n",
    ]
    assert learned_text(ChatTemplate(LIKE_R1, {"bos_token": "<s>"}), THOUGHTS) == [
        "ONE <end>",
        "TWO\n<end>",
    ]


def test_a_template_that_leaves_messages_out_is_no_conversation() -> None:
    with pytest.raises(ChatError, match="does not show message 2"):
        ChatTemplate("{{ messages[-1].content }}", {}).format(TALK)


RECORDS = {
    "messages": ({"messages": TALK}, TALK),
    "conversations": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        [("user", "a"), ("assistant", "b")],
    ),
    "prompt and completion": (
        {"prompt": "a", "completion": "b", "other": 3},
        [("user", "a"), ("assistant", "b")],
    ),
    "lists": (
        {
            "prompt": [{"role": "user", "content": "a"}],
            "completion": [{"role": "assistant", "content": "b"}],
        },
        [("user", "a"), ("assistant", "b")],
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_shape_of_a_record_is_understood(name: str) -> None:
    record, expected = RECORDS[name]
    pairs = [one if isinstance(one, tuple) else (one["role"], one["content"]) for one in expected]
    assert [(message["role"], message["content"]) for message in messages_of(record)] == pairs


def test_tool_calls_need_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert messages_of({"messages": [message]}) == [message]


TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_the_template_is_told_of_tools(tools: object) -> None:
    template = ChatTemplate("{% if tools %}{{ tools | tojson }}|{% endif %}" + CHATML, {})
    record = {"messages": TALK, "tools": tools}
    text, spans = answers(template, messages_of(record), tools_of(record))
    plain, plain_spans = answers(template, TALK)
    before = f"{json.dumps(TOOLS)}|"
    assert text == before + plain
    assert spans == [(start + len(before), stop + len(before)) for start, stop in plain_spans]


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('only users') }}", "{{ messages[99].content.x }}", "{{ 1 + messages }}"],
)
def test_a_template_that_fails_says_so(source: str) -> None:
    with pytest.raises(ChatError, match=r"the chat template (refuses|fails on) it"):
        ChatTemplate(source, {}).format(TALK)


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(ChatError, match="refuses it"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(TALK)


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(DataError, match="not a Jinja template"):
        ChatTemplate("{% for %}", {})


def test_only_answers_are_learned_in_the_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    train_tokenizer(iter(["What is naïve? Be brief."] * 5), 300, END_OF_TEXT).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": LLAMA2, "bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": TALK}) + "\n" for _ in range(3))
    )
    recipe = DataRecipe(
        (str(tmp_path / "chats.jsonl"),), chat=True, tokenizer=str(folder), holdout_every=0
    )
    dataset = make_dataset(tmp_path / "ours", recipe, print, 1)
    reader = dataset.split("train")
    tokenizer = load_tokenizer(folder / "tokenizer.json", "")
    [document, *_] = documents_of(dataset, "train")
    assert tokenizer.decode(document[:-1]) == ChatTemplate(*TEMPLATES["Llama 2"]).render(TALK)
    learned = reader.learned(0, len(document))
    kept = np.array(document)[learned]
    assert (
        tokenizer.decode(kept.tolist(), skip_special_tokens=False)
        == f" 4</s> 6, naïve one</s>{END_OF_TEXT}"
    )
    assert reader.has_mask


def test_a_special_token_in_a_chat_is_that_token(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(iter(["x"]), 300, END_OF_TEXT)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    recipe = DataRecipe(
        (str(tmp_path / "chats.jsonl"),),
        chat=True,
        tokenizer=str(tmp_path / "tokenizer.json"),
        holdout_every=0,
    )
    [document] = documents_of(make_dataset(tmp_path / "ours", recipe, print, 1), "train")
    assert document.count(tokenizer.token_to_id("<|im_start|>")) == len(TALK)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("tokenizer_config.json", '{"chat_template": [3]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("chat_template.jinja", " \n"),
    ],
)
def test_a_damaged_description_of_a_tokenizer_is_an_error(
    tmp_path: Path, name: str, contents: str
) -> None:
    (tmp_path / name).write_text(contents)
    with pytest.raises(DataError, match=r"not readable|the chat template is empty"):
        DataRecipe(("x",), tokenizer=str(tmp_path), chat=True).chat_template()
