"""Conversations are rendered as transformers renders them, and become documents of data sets."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CALLS, PLAIN, PUBLISHED, TOOLS, S
from making_helpers import Make, documents_of, learned_of, lines

from lather.data.chat import CHATML, ChatTemplate
from lather.data.conversations import ChatError, Messages, messages_of, tools_of
from lather.data.documents import load_tokenizer, train_tokenizer
from lather.data.recipe import END_OF_TEXT, DataRecipe
from lather.errors import DataError


def of_transformers(tokenizer: Path, source: str, tokens: dict[str, str]) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer), chat_template=source, **tokens
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_text_is_that_of_transformers(name: str, tokenizer: Path) -> None:
    one = PUBLISHED[name]
    ours = ChatTemplate(one.source, one.tokens)
    theirs = of_transformers(tokenizer, one.source, one.tokens)
    plain, called = one.fitting(PLAIN), ours.fitting(one.fitting(CALLS), TOOLS)
    cases: list[tuple[Messages, Any]] = [(plain, None), (plain[:-1], None), (plain, TOOLS)]
    if one.calls:
        cases += [(called, TOOLS), (called[:-1], TOOLS)]
    for messages, tools in cases:
        for asking in (False, True):
            expected = theirs.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=asking
            )
            assert ours.render(messages, asking=asking, tools=tools) == expected


@pytest.mark.parametrize("calls", [False, True])
def test_blocks_of_generation_are_obeyed(tokenizer: Path, calls: bool) -> None:
    """The learned characters are those of the tokens that transformers masks."""
    one, messages = PUBLISHED["SmolLM3"], CALLS if calls else PLAIN
    theirs = of_transformers(tokenizer, one.source, one.tokens).apply_chat_template(
        messages,
        tools=TOOLS,
        return_assistant_tokens_mask=True,
        return_dict=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    pairs = zip(theirs["offset_mapping"], theirs["assistant_masks"], strict=True)
    expected = {place for span, masked in pairs if masked for place in range(*span)}
    template = ChatTemplate(one.source, {})
    spans = template.format(messages, TOOLS).answers
    assert {place for span in spans for place in range(*span)} == expected
    marked = [{**message, "weight": 0} if n == 2 else message for n, message in enumerate(messages)]
    assert template.format(marked, TOOLS).answers == spans[1:]


def test_content_as_a_list_of_texts(tokenizer: Path) -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "!"}]
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    talk = messages_of({"messages": [PLAIN[1], {"role": "assistant", "content": parts}]})
    template, theirs = ChatTemplate(source, {}), of_transformers(tokenizer, source, {})
    assert learned_of(template, talk) == ["4!<|im_end|>\n"]
    assert template.render(talk) == theirs.apply_chat_template(talk, tokenize=False)
    with pytest.raises(ChatError, match="shows no list of parts, as message 1 has"):
        ChatTemplate(CHATML, {}).format(talk)


def test_templates_for_tools(tmp_path: Path) -> None:
    sources = {"default": CHATML, "tool_use": "T" + CHATML}
    named = [{"name": name, "template": source} for name, source in sources.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.beside(tmp_path / "tokenizer.json")
    assert template.render(PLAIN) == ChatTemplate(CHATML, {}).render(PLAIN)
    assert template.render(PLAIN, tools=TOOLS).startswith("T<|im_start|>")
    copied = pickle.loads(pickle.dumps(template))
    assert copied.render(PLAIN, tools=TOOLS) == template.render(PLAIN, tools=TOOLS)


TOKENS = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
OLDER = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
EXTRA = {"bos_token": "", "eos_token": None, "extra_special_tokens": {"call_token": "</s>"}}


@pytest.mark.parametrize(
    ("settings", "older"),
    [(TOKENS, None), ({}, OLDER), (EXTRA, OLDER), (TOKENS | {"added_tokens_decoder": {}}, EXTRA)],
)
def test_templates_are_given_the_special_tokens_that_transformers_gives_them(
    settings: dict[str, Any], older: dict[str, Any] | None, tokenizer: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": source + "{{ call_token }}",
    }
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, **settings}))
    if older is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = ChatTemplate.beside(tmp_path / "tokenizer.json").render(PLAIN)
    assert ours == theirs.apply_chat_template(PLAIN, tokenize=False)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "JSON"])
def test_the_template_is_told_of_tools(tools: object) -> None:
    template = ChatTemplate("{% if tools %}{{ tools | tojson }}|{% endif %}" + CHATML, {})
    record = {"messages": copy.deepcopy(PLAIN), "tools": tools}
    formatted = template.format(messages_of(record), tools_of(record))
    assert formatted.text == f"{json.dumps(TOOLS)}|{template.render(PLAIN)}"
    assert learned_of(template, PLAIN, TOOLS) == learned_of(template, PLAIN)


FAILING = {
    "{{ raise_exception('only users') }}": "refuses it: only users",
    "{{ messages[99].content.x }}": "refuses it",
    "{{ 1 + messages }}": "fails on it",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}": "refuses it",  # leaves the sandbox
    "{{ messages[-1].content }}": "does not show message 2",
}


@pytest.mark.parametrize("source", FAILING)
def test_a_template_that_fails_says_so(source: str) -> None:
    with pytest.raises(ChatError, match=FAILING[source]):
        ChatTemplate(source, {}).format(PLAIN)


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(DataError, match="not a Jinja template"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("tokenizer_config.json", '{"chat_template": [3]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("chat_template.jinja", " \n"),
        ("special_tokens_map.json", "{"),
        ("special_tokens_map.json", "[3]"),
    ],
)
def test_a_damaged_description_of_a_tokenizer_is_an_error(
    tmp_path: Path, name: str, contents: str
) -> None:
    (tmp_path / name).write_text(contents)
    with pytest.raises(DataError, match=r"not readable|the chat template is empty"):
        DataRecipe(("x",), tokenizer=str(tmp_path), chat=True).chat_template()


def test_only_answers_are_learned_in_the_data_set(tmp_path: Path, make: Make) -> None:
    """A special token that a template names is that token."""
    folder, talk = tmp_path / "model", [*PLAIN[:-1], {**PLAIN[-1], "content": "6, naïve one"}]
    folder.mkdir()
    tokenizer = train_tokenizer(iter(["What is naïve? Be brief."] * 5), 300, END_OF_TEXT)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    source = PUBLISHED["Llama 2"].source
    settings = {"chat_template": source, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chats.jsonl").write_text(lines(*[{"messages": talk}] * 3))
    dataset = make(tmp_path / "chats.jsonl", chat=True, tokenizer=str(folder))
    reader, tokenizer = dataset.split("train"), load_tokenizer(folder / "tokenizer.json", "")
    [document, *_] = documents_of(dataset)
    text = tokenizer.decode(document[:-1], skip_special_tokens=False)
    assert text == ChatTemplate(source, S).render(talk)
    assert document.count(tokenizer.token_to_id("<s>")) == 2
    learned = np.array(document)[reader.learned(0, len(document))].tolist()
    text = tokenizer.decode(learned, skip_special_tokens=False)
    assert text == f" 4 </s> 6, naïve one </s>{END_OF_TEXT}"
    assert reader.has_mask
