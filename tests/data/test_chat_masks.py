"""Answers are found in the text of every published kind of template, with and without tools."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from chat_templates import PUBLISHED, Published, S, answers

from lather.data.chat import CHATML, ChatTemplate
from lather.data.conversations import ChatError, messages_of
from lather.data.documents import train_tokenizer
from lather.data.recipe import END_OF_TEXT

PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6, not 7"},
]
WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
CALLS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm is it in Ulm?"},
    {"role": "assistant", "tool_calls": [WEATHER]},
    {"role": "tool", "name": "weather", "content": "9"},
    {"role": "assistant", "content": "It is 9."},
]
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
WITH_CALLS = [name for name, one in PUBLISHED.items() if one.calls]


def messages_for(one: Published, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return copy.deepcopy(messages if one.system else messages[1:])


def learned(name: str, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    template = ChatTemplate(PUBLISHED[name].source, PUBLISHED[name].tokens)
    text, spans = answers(template, messages, tools)
    assert spans == sorted(spans)
    return [text[start:stop] for start, stop in spans]


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(iter(["x"]), 300, END_OF_TEXT).save(str(file))
    return file


def of_transformers(tokenizer_file: Path, one: Published) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        chat_template=one.source,
        **one.tokens,
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_text_is_that_of_transformers(name: str, tokenizer_file: Path) -> None:
    one = PUBLISHED[name]
    ours, theirs = ChatTemplate(one.source, one.tokens), of_transformers(tokenizer_file, one)
    plain, called = messages_for(one, PLAIN), ours.fitting(messages_for(one, CALLS), TOOLS)
    cases = [(plain, None), (plain[:-1], None), (plain, TOOLS)]
    if one.calls:
        cases += [(called, TOOLS), (called[:-1], TOOLS)]
    for messages, tools in cases:
        for asking in (False, True):
            expected = theirs.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=asking,
            )
            assert ours.render(messages, asking=asking, tools=tools) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_plain_answers(name: str) -> None:
    one = PUBLISHED[name]
    assert learned(name, messages_for(one, PLAIN)) == list(one.plain)
    assert learned(name, messages_for(one, PLAIN), TOOLS) == list(one.plain)


@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize("content", ["absent", "null", "empty"])
@pytest.mark.parametrize("arguments", ["object", "text"])
def test_answers_that_call_a_tool(name: str, content: str, arguments: str) -> None:
    one, messages = PUBLISHED[name], messages_for(PUBLISHED[name], CALLS)
    call = messages[-3]
    if content != "absent":
        call["content"] = {"null": None, "empty": ""}[content]
    if arguments == "text":
        call["tool_calls"][0]["function"]["arguments"] = json.dumps({"town": "Ulm"})
    assert learned(name, messages, TOOLS) == list(one.calls or ())


def test_a_long_conversation_is_read_in_proportion_to_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The characters that are rendered, which are the time, grow as the conversation does; its
    answers are those that each rendering by itself gives."""
    rendered = []
    original = ChatTemplate._written

    def counting(self: ChatTemplate, program: Any, messages: Any, *others: Any) -> str:
        rendered.append(len(messages))
        return original(self, program, messages, *others)

    monkeypatch.setattr(ChatTemplate, "_written", counting)
    turn = [{**CALLS[1]}, {**CALLS[2], "content": "I look."}, CALLS[3], CALLS[4]]
    work = {}
    for count in (50, 400):
        rendered.clear()
        found = learned("Qwen2.5", turn * count, TOOLS)
        work[count] = sum(rendered)
        call, answer = PUBLISHED["Qwen2.5"].calls or ()
        assert found == ["I look.\n" + call, answer] * count
    assert work[400] < 10 * work[50]


def test_each_part_before_the_last_question_loses_its_reasoning() -> None:
    """Qwen3 removes the reasoning of earlier answers; gpt-oss shows it before a call alone."""
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "reasoning_content": "hm", "content": "ONE"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "reasoning_content": "so", "tool_calls": [WEATHER]},
        {"role": "tool", "content": "9"},
        {"role": "assistant", "thinking": "then", "content": "TWO"},
    ]
    call = PUBLISHED["Qwen3"].calls or ()
    assert learned("Qwen3", talk) == [
        "ONE<|im_end|>\n",
        "<think>\nso\n</think>\n\n" + call[0],
        "<think>\nthen\n</think>\n\nTWO<|im_end|>\n",
    ]
    analysis = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    assert learned("gpt-oss", talk) == [
        "<|channel|>final<|message|>ONE<|end|>",
        analysis.format("so") + (PUBLISHED["gpt-oss"].calls or ())[0],
        analysis.format("then") + "<|channel|>final<|message|>TWO<|return|>",
    ]


PICKY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% if m.content and m.content | length > 9 %}!{% endif %}"
    "{% if m.content and m.content.endswith('.') %}?{% endif %}"
    "{% if m.content and 'x' not in m.content %}#{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_templates_that_look_at_contents() -> None:
    talk = [
        {"role": "user", "content": "ask."},
        {"role": "assistant", "content": "answered."},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "much longer x"},
    ]
    text, spans = answers(ChatTemplate(PICKY, {}), talk)
    expected = ["answered.?#<|im_end|>\n", "<|im_end|>\n", "much longer x!<|im_end|>\n"]
    assert [text[start:stop] for start, stop in spans] == expected


UNUSUAL = {
    "eos after the last alone": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{{ eos_token if loop.last }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ["4", "6, not 7</s>"],
    ),
    "no generation prompt": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        ["<|im_start|>assistant\n4<|im_end|>\n", "<|im_start|>assistant\n6, not 7<|im_end|>\n"],
    ),
    "a prompt that asks for reasoning": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
        ["4</s>", "6, not 7</s>"],
    ),
    "an end that has a beginning in common with what follows": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}<|end|>{% endif %}",
        ["4", "6, not 7<|end|>"],
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_templates(name: str) -> None:
    source, expected = UNUSUAL[name]
    text, spans = answers(ChatTemplate(source, S), PLAIN)
    assert [text[start:stop] for start, stop in spans] == expected


def test_answers_that_follow_each_other() -> None:
    talk = [*PLAIN[:3], {"role": "assistant", "content": "or four"}, *PLAIN[3:]]
    assert learned("Qwen2.5", talk) == [
        "4<|im_end|>\n",
        "or four<|im_end|>\n",
        "6, not 7<|im_end|>\n",
    ]
    assert learned("gpt-oss", talk)[:2] == [
        "<|channel|>final<|message|>4<|end|>",
        "<|channel|>final<|message|>or four<|end|>",
    ]
    joins = (
        "{% for m in messages %}{% if loop.first or m.role != messages[loop.index0 - 1].role %}"
        "<{{ m.role }}>{% else %}{{ '\n' }}{% endif %}{{ m.content }}"
        "{% if loop.last or m.role != messages[loop.index0 + 1].role %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    text, spans = answers(ChatTemplate(joins, S), talk)
    assert "".join(text[start:stop] for start, stop in spans) == "4\nor four</s>6, not 7</s>"


def test_an_answer_whose_place_is_not_told_is_refused() -> None:
    source = (
        "{% if messages | length < 5 %}{{ raise_exception('too short') }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    with pytest.raises(ChatError, match="do not tell where the answer in message 2 begins"):
        ChatTemplate(source, {}).format(PLAIN)


@pytest.mark.parametrize("calls", [False, True])
def test_blocks_of_generation_are_obeyed(tokenizer_file: Path, calls: bool) -> None:
    """The learned characters are those of the tokens that transformers masks."""
    one, messages = PUBLISHED["SmolLM3"], CALLS if calls else PLAIN
    theirs = of_transformers(tokenizer_file, one).apply_chat_template(
        messages,
        tools=TOOLS,
        return_assistant_tokens_mask=True,
        return_dict=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    _, spans = answers(ChatTemplate(one.source, {}), messages, TOOLS)
    expected = {
        place
        for (start, stop), masked in zip(
            theirs["offset_mapping"],
            theirs["assistant_masks"],
            strict=True,
        )
        if masked
        for place in range(start, stop)
    }
    assert {place for start, stop in spans for place in range(start, stop)} == expected
    marked = [{**message, "weight": 0} if n == 2 else message for n, message in enumerate(messages)]
    _, fewer = answers(ChatTemplate(one.source, {}), marked, TOOLS)
    assert fewer == spans[1:]


def test_blocks_in_a_macro_have_no_place_and_renderings_tell() -> None:
    source = (
        "{% macro answer(m) %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% endmacro %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ answer(m) }}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    text, spans = answers(ChatTemplate(source, {}), PLAIN)
    assert [text[start:stop] for start, stop in spans] == ["4<|im_end|>", "6, not 7<|im_end|>"]


def test_content_as_a_list_of_texts(tokenizer_file: Path) -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "!"}]
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    talk = messages_of({"messages": [PLAIN[1], {"role": "assistant", "content": parts}]})
    text, spans = answers(ChatTemplate(source, {}), talk)
    assert [text[start:stop] for start, stop in spans] == ["4!<|im_end|>\n"]
    theirs = of_transformers(tokenizer_file, Published(source))
    assert text == theirs.apply_chat_template(talk, tokenize=False)
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
