"""Answers are found where a template writes a message otherwise because of those around it."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import PUBLISHED

from lather.data import answers
from lather.data.chat import ChatTemplate
from lather.data.conversations import messages_of
from lather.data.documents import train_tokenizer
from lather.data.recipe import END_OF_TEXT

ASKED = {"role": "user", "content": "How warm?"}
RESULT = {"role": "tool", "content": "9"}
ANSWERED = {"role": "assistant", "content": "It is 9."}
EOS = {"eos_token": "</s>"}


def call_of(name: str = "weather", **others: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": {"town": "Ulm"}}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls, **others}


def learned(source: str, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    formatted = ChatTemplate(source, EOS).format(messages_of({"messages": messages}), tools)
    return [formatted.text[start:stop] for start, stop in formatted.answers]


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
def test_a_template_that_adds_the_content_of_every_call(tmp_path: Path, content: str) -> None:
    """As DeepSeek-V3, which fails without it, and writes a second call right after a result."""
    transformers = pytest.importorskip("transformers")
    train_tokenizer(iter(["x"]), 300, END_OF_TEXT).save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        chat_template=V3,
        **EOS,
    )
    given = {"absent": {}, "null": {"content": None}, "empty": {"content": ""}}[content]
    talk = [ASKED, call_of(**given), RESULT, call_of(**given), RESULT, ANSWERED]
    call = '<|call|>weather\n{"town": "Ulm"}<|end_of_calls|></s>'
    assert learned(V3, talk) == ["<|calls|>" + call, "\n" + call, "It is 9.</s>"]
    ours = ChatTemplate(V3, EOS)
    fitting = ours.fitting(messages_of({"messages": talk}))
    assert [message.get("content") for message in fitting[1:4:2]] == ["", ""]
    expected = theirs.apply_chat_template(fitting, tokenize=False)
    assert ours.render(fitting) == expected


def test_a_first_answer_before_which_the_template_does_not_ask() -> None:
    """As OLMo 2, which asks in its loop over the messages."""
    source = (
        "{{ eos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}"
        "{% if loop.last and add_generation_prompt %}<|assistant|>{% endif %}{% endfor %}"
    )
    assert learned(source, [ANSWERED]) == ["It is 9.</s>"]
    assert learned(source, [ANSWERED, ASKED, ANSWERED]) == ["It is 9.</s>"] * 2


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
