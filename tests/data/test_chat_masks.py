"""Answers are found in the text of every published kind of template, with and without tools, also
where a template writes a message otherwise because of those around it."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CALLS, PLAIN, PUBLISHED, TOOLS, WEATHER, S
from making_helpers import learned_of

from lather.data import answers
from lather.data.chat import ChatTemplate
from lather.data.conversations import ChatError, Messages, messages_of

ASKED = {"role": "user", "content": "How warm?"}
RESULT = {"role": "tool", "content": "9"}
ANSWERED = {"role": "assistant", "content": "It is 9."}


def call_of(name: str = "weather", **others: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": {"town": "Ulm"}}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls, **others}


def learned(name: str, messages: Messages, tools: Any = None) -> list[str]:
    """Return the answers that are learned with a published template, or with another source."""
    source = PUBLISHED[name].source if name in PUBLISHED else name
    tokens = PUBLISHED[name].tokens if name in PUBLISHED else S
    return learned_of(ChatTemplate(source, tokens), messages_of({"messages": messages}), tools)


@pytest.mark.parametrize("name", PUBLISHED)
def test_plain_answers(name: str) -> None:
    one = PUBLISHED[name]
    for tools in (None, TOOLS):
        assert learned(name, one.fitting(PLAIN), tools) == list(one.plain)


@pytest.mark.parametrize("name", [name for name, one in PUBLISHED.items() if one.calls])
@pytest.mark.parametrize("content", ["absent", "null", "empty"])
@pytest.mark.parametrize("arguments", ["object", "text"])
def test_answers_that_call_a_tool(name: str, content: str, arguments: str) -> None:
    one = PUBLISHED[name]
    messages = one.fitting(CALLS)
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
JOINS = (
    "{% for m in messages %}{% if loop.first or m.role != messages[loop.index0 - 1].role %}"
    "<{{ m.role }}>{% else %}{{ '\n' }}{% endif %}{{ m.content }}"
    "{% if loop.last or m.role != messages[loop.index0 + 1].role %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THOUGHTS = [
    ("user", "one"),
    ("assistant", "<think>a</think>ONE "),
    ("user", "two"),
    ("assistant", "TWO\n"),
]
TWICE = [("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d"), ("assistant", "e")]
TALK = [(message["role"], message["content"]) for message in PLAIN]
UNUSUAL: dict[str, tuple[str, list[tuple[str, str]], list[str]]] = {
    "looks at contents": (
        PICKY,
        [
            ("user", "ask."),
            ("assistant", "answered."),
            ("user", ""),
            ("assistant", ""),
            ("user", "x"),
            ("assistant", "much longer x"),
        ],
        ["answered.?#<|im_end|>\n", "<|im_end|>\n", "much longer x!<|im_end|>\n"],
    ),
    "eos after the last alone": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{{ eos_token if loop.last }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        TALK,
        ["4", "6, not 7</s>"],
    ),
    "no generation prompt": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        TALK,
        ["<|im_start|>assistant\n4<|im_end|>\n", "<|im_start|>assistant\n6, not 7<|im_end|>\n"],
    ),
    "a prompt that asks for reasoning": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
        THOUGHTS,
        ["<think>a</think>ONE </s>", "TWO\n</s>"],
    ),
    "an end that has a beginning in common with what follows": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}<|end|>{% endif %}",
        TALK,
        ["4", "6, not 7<|end|>"],
    ),
    "as Qwen3, reasoning in contents": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        THOUGHTS,
        ["ONE<|im_end|>\n", "<think>\n\n</think>\n\nTWO<|im_end|>\n"],
    ),
    "as OLMo 2, which asks in its loop, and not before a first answer": (
        "{{ eos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}"
        "{% if loop.last and add_generation_prompt %}<|assistant|>{% endif %}{% endfor %}",
        [("assistant", "4"), *TALK[1:3]],
        ["4</s>"] * 2,
    ),
    "as Nemotron Nano 2, whose last answer follows the loop": (
        "{% set rest = messages[:-1] if messages[-1].role == 'assistant' else messages %}"
        "{% for m in rest %}<{{ m.role }}>\n"
        "{{ m.content }}\n<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>\n<think>\n"
        "{% elif messages[-1].role == 'assistant' %}"
        "<assistant>\n<think>\n{{ messages[-1].content }}\n<end>\n{% endif %}",
        TALK,
        ["4\n<end>\n", "6, not 7\n<end>\n"],
    ),
    "as Apertus, which ends an answer before the next question": (
        "{% set ns = namespace(open=false) %}{% for m in messages %}"
        "{% if m.role == 'user' and ns.open %}<end>{% endif %}<{{ m.role }}>{{ m.content }}"
        "{% set ns.open = m.role == 'assistant' %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% elif ns.open %}<end>{% endif %}",
        TALK,
        ["4<end>", "6, not 7<end>"],
    ),
    "a macro whose text is compared, and a stored selection": (
        "{% macro names(items) %}{% for item in items %}{{ item }}{% endfor %}{% endmacro %}"
        "{{ '!' if names(['a', 'b']) == 'ab' }}{% set talk = messages | rejectattr('none') %}"
        "{% for m in talk %}<{{ m.role }}>{{ m.content }}{{ eos_token if loop.last }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        TALK,
        ["4", "6, not 7</s>"],
    ),
    "copies of the messages": (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}"
        "{% set ns.all = ns.all + [{'role': m.role, 'content': m.content}] %}{% endfor %}"
        "{% for m in ns.all %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        TALK,
        ["4<end>", "6, not 7<end>"],
    ),
    "blocks of generation in a macro": (
        "{% macro answer(m) %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% endmacro %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ answer(m) }}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        TALK,
        ["4<|im_end|>", "6, not 7<|im_end|>"],
    ),
    "two answers that are joined": (JOINS, TWICE, ["b", "\nc</s>", "e</s>"]),
    "two answers": ("Qwen2.5", TWICE, ["b<|im_end|>\n", "c<|im_end|>\n", "e<|im_end|>\n"]),
    "two answers of gpt-oss": (
        "gpt-oss",
        TWICE,
        [f"<|channel|>final<|message|>{end}" for end in ("b<|end|>", "c<|end|>", "e<|return|>")],
    ),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_templates(case: str) -> None:
    source, pairs, expected = UNUSUAL[case]
    talk = [{"role": role, "content": content} for role, content in pairs]
    assert learned(source, talk) == expected


def test_an_answer_whose_place_is_not_told_is_refused() -> None:
    source = (
        "{% if messages | length < 5 %}{{ raise_exception('too short') }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    with pytest.raises(ChatError, match="do not tell where the answer in message 2 begins"):
        learned(source, PLAIN)


HEADED_BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\n' ~ (m.content or '') ~ '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM3: the block has the answer's header, and calls of tools are not shown."""


@pytest.mark.parametrize(
    "unlearned",
    [
        {**ANSWERED, "weight": 0},
        {"role": "assistant", "content": "", "weight": 0},
        call_of(),
        call_of(content=""),
        call_of(content="I look."),
    ],
    ids=["weight", "weight-of-empty", "call", "call-and-empty", "call-and-text"],
)
def test_nothing_of_a_block_is_learned_if_its_answer_is_not(unlearned: dict[str, Any]) -> None:
    talk = [ASKED, unlearned, RESULT, ANSWERED]
    assert learned(HEADED_BLOCKS, talk) == ["<|im_start|>assistant\nIt is 9.<|im_end|>\n"]


HARMONY = PUBLISHED["gpt-oss"].source.replace(
    "{% if message.thinking %}",
    "{% set later = rest[loop.index:] | rejectattr('tool_calls') "
    "| selectattr('role', 'equalto', 'assistant') | list %}\n"
    "{% if message.thinking and not later %}",
    1,
)
"""As gpt-oss: reasoning before a call is shown only until a final answer follows."""


def test_reasoning_that_is_removed_when_a_final_answer_follows() -> None:
    talk = [ASKED, call_of(thinking="hm"), RESULT, call_of("rain", thinking="so"), RESULT]
    called = ' to=functions.{}<|channel|>commentary json<|message|>{{"town": "Ulm"}}<|call|>'
    thought = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    assert learned(HARMONY, talk) == [
        thought.format("hm") + called.format("weather"),
        thought.format("so") + called.format("rain"),
    ]
    final = "<|channel|>final<|message|>It is 9.<|{}|>"
    assert learned(HARMONY, [*talk, ANSWERED, *talk, ANSWERED]) == [
        called.format("weather"),
        called.format("rain"),
        final.format("end"),
        called.format("weather"),
        called.format("rain"),
        final.format("return"),
    ]


GLM4 = """[gMASK]<sop>
{%- for m in messages %}
{% if m.role == 'assistant' and m.tool_calls %}
{% for call in m.tool_calls %}
<|assistant|>{{ call.function.name ~ '\n' ~ call.function.arguments | tojson }}
{%- endfor %}
{% elif m.role == 'tool' %}
{{ '<|observation|>\n' ~ m.content }}
{%- else %}
{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""


def test_a_call_that_follows_the_token_without_white_space() -> None:
    """As GLM-4, which asks for an answer with a line's end that a call does not have."""
    call = 'weather\n{"town": "Ulm"}'
    talk = [ASKED, call_of(), RESULT, ANSWERED, ASKED, call_of(content="")]
    assert learned(GLM4, talk) == [call, "It is 9.", call]


V3 = """{% set ns = namespace(called=false, results=false) %}
{% for m in messages %}
{% if m.role == 'user' %}{% set ns.results = false %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}{% set ns.results = false %}
{% for call in m.tool_calls %}
{{ '\n' if ns.called else '<|Assistant|>' + m.content + '<|calls|>' }}{% set ns.called = true %}
{{- '<|call|>' + call.function.name + '\n' + call.function.arguments }}
{%- endfor %}
{{ '<|end_of_calls|>' + eos_token }}
{%- elif m.role == 'assistant' %}
{{ ('<|end_of_results|>' if ns.results else '<|Assistant|>') + m.content + eos_token }}
{%- set ns.results = false %}
{% elif m.role == 'tool' %}{% set ns.results = true %}
{{ '<|result|>' + m.content + '<|end_of_result|>' }}
{%- endif %}
{% endfor %}
{% if ns.results %}{{ '<|end_of_results|>' }}
{%- elif add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""


@pytest.mark.parametrize("content", ["absent", "null", "empty"])
def test_a_template_that_adds_the_content_of_every_call(tokenizer: Path, content: str) -> None:
    """As DeepSeek-V3, which fails without it, and writes a second call right after a result."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer), chat_template=V3, **S
    )
    given = {"absent": {}, "null": {"content": None}, "empty": {"content": ""}}[content]
    talk = [ASKED, call_of(**given), RESULT, call_of(**given), RESULT, ANSWERED]
    call = '<|call|>weather\n{"town": "Ulm"}<|end_of_calls|></s>'
    assert learned(V3, talk) == ["<|calls|>" + call, "\n" + call, "It is 9.</s>"]
    ours = ChatTemplate(V3, S)
    fitting = ours.fitting(messages_of({"messages": talk}))
    assert [message.get("content") for message in fitting[1:4:2]] == ["", ""]
    expected = theirs.apply_chat_template(fitting, tokenize=False)
    assert ours.render(fitting) == expected


def test_long_conversations_do_not_take_what_follows_an_answer_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mistral puts the tools before every question that is the same as the last one."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    other = {"role": "user", "content": "Really?"}
    talk = [ASKED, ANSWERED, other, ANSWERED] * 3 + [other, ANSWERED] * 20 + [ASKED, ANSWERED]
    turn = [call_of(), RESULT, ANSWERED]
    called = [ASKED, *turn, other, *turn] * 10 + [ASKED, *turn]
    source = PUBLISHED["Mistral"].source
    assert set(learned(source, talk, tools)) == {" It is 9.</s>"}
    found = learned(source, called, tools)
    monkeypatch.setattr(answers, "LONG", len(called))
    assert found == learned(source, called, tools)
    assert "AVAILABLE_TOOLS" not in json.dumps(found)
