"""Chat templates that behave as published models document theirs, in words of our own.

Each is a source, the special tokens that it names, and whether it takes tools.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from lather.data.conversations import Messages

PLAIN: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6, not 7"},
]
WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
CALLS: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm is it in Ulm?"},
    {"role": "assistant", "tool_calls": [WEATHER]},
    {"role": "tool", "name": "weather", "content": "9"},
    {"role": "assistant", "content": "It is 9."},
]
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


@dataclass(frozen=True)
class Published:
    """A template, and the answers in `PLAIN` and `CALLS`."""

    source: str
    tokens: dict[str, str] = field(default_factory=dict)
    plain: tuple[str, ...] = ()
    """The learned texts of the plain conversation."""
    calls: tuple[str, ...] | None = None
    """The learned texts of the conversation with a tool; None: the template does not show calls."""
    system: bool = True
    """Whether the template takes a system message."""

    def fitting(self, messages: Messages) -> Messages:
        return copy.deepcopy(messages if self.system else messages[1:])


CALL = '{"name": "weather", "arguments": {"town": "Ulm"}}'
TOOLS_IN_SYSTEM = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
"""
CALLS_OF_QWEN = """{% for call in message.tool_calls or [] %}
{% set call = call.function if call.function else call %}
{% if not loop.first or message.content %}{{ '\n' }}{% endif %}
{{ '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
{%- set given = call.arguments %}
{{- given if given is string else given | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}"""
RESULTS_OF_QWEN = """{% elif message.role == 'tool' %}
{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
"""
QWEN25 = (
    TOOLS_IN_SYSTEM
    + """{% else %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}
{% for message in messages %}
{% if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{ '<|im_start|>assistant\n' ~ (message.content or '') }}
{%- """
    + CALLS_OF_QWEN.removeprefix("{% ")
    + """{{ '<|im_end|>\n' }}
{%- """
    + RESULTS_OF_QWEN.removeprefix("{% ")
    + """{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)
QWEN3 = (
    TOOLS_IN_SYSTEM
    + """{% endif %}
{% set ns = namespace(question=messages | length - 1, looking=true) %}
{% for message in messages[::-1] %}
{% if ns.looking and message.role == 'user' and message.content is string %}
{% set ns.looking = false %}{% set ns.question = messages | length - loop.index %}
{% endif %}{% endfor %}
{% for message in messages %}
{% if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{% set content = message.content if message.content is string else '' %}
{% set thought = '' %}
{% if message.reasoning_content is string %}{% set thought = message.reasoning_content %}
{% elif '</think>' in content %}
{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{% set content = content.split('</think>')[-1].lstrip('\n') %}
{% endif %}
{% if loop.index0 > ns.question and (loop.last or thought) %}
{{ '<|im_start|>assistant\n<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' }}
{{- content.lstrip('\n') }}
{%- else %}{{ '<|im_start|>assistant\n' ~ content }}
{%- endif %}
"""
    + CALLS_OF_QWEN
    + """{{ '<|im_end|>\n' }}
{%- """
    + RESULTS_OF_QWEN.removeprefix("{% ")
    + """{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)
LLAMA2 = """{% if messages[0].role == 'system' %}
{% set rest = messages[1:] %}{% set system = messages[0].content %}
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}
{% for message in rest %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user, assistant, user, assistant') }}
{% endif %}
{% if loop.index0 == 0 and system %}
{% set content = '<<SYS>>\n' ~ system ~ '\n<</SYS>>\n\n' ~ message.content %}
{% else %}{% set content = message.content %}{% endif %}
{% if message.role == 'user' %}{{ bos_token ~ '[INST] ' ~ content.strip() ~ ' [/INST]' }}
{%- else %}{{ ' ' ~ content.strip() ~ ' ' ~ eos_token }}
{%- endif %}{% endfor %}"""
LLAMA3 = """{% for message in messages %}
{% set text = '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n'
 ~ message.content | trim ~ '<|eot_id|>' %}
{% if loop.first %}{% set text = bos_token ~ text %}{% endif %}
{{ text }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
ALWAYS_ASKS = LLAMA3.replace("{% if add_generation_prompt %}", "{% if true %}")
LLAMA31 = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{% else %}{% set system = '' %}{% endif %}
{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{ 'Today Date: 26 Jul 2024\n\n' ~ system ~ '<|eot_id|>' }}
{%- if tools %}
{% set question = messages[0].content | trim %}{% set messages = messages[1:] %}
{{ '<|start_header_id|>user<|end_header_id|>\n\nUse these functions.\n\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) ~ '\n\n' }}{% endfor %}
{{ question ~ '<|eot_id|>' }}
{%- endif %}
{% for message in messages %}
{% if message.role in ('tool', 'ipython') %}
{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- set content = message.content %}
{{- content | tojson if content is mapping else content }}
{{ '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{% set call = message.tool_calls[0].function %}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{{- '{"name": "' ~ call.name ~ '", "parameters": ' }}
{{- call.arguments | tojson }}
{{- '}<|eot_id|>' }}
{%- else %}
{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' }}
{{- message.content | trim ~ '<|eot_id|>' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
MISTRAL = """{% if messages[0].role == 'system' %}
{% set system = messages[0].content %}{% set rest = messages[1:] %}
{% else %}{% set rest = messages %}{% endif %}
{% set questions = rest | selectattr('role', 'equalto', 'user') | list %}
{% set ns = namespace(turn=0) %}
{% for message in rest %}
{% if message.role == 'user' or (message.role == 'assistant' and message.tool_calls is undefined) %}
{% if (message.role == 'user') != (ns.turn % 2 == 0) %}
{{ raise_exception('roles must alternate') }}
{% endif %}{% set ns.turn = ns.turn + 1 %}
{% endif %}{% endfor %}
{{ bos_token }}
{%- for message in rest %}
{% if message.role == 'user' %}
{% if tools and message == questions[-1] %}
{{ '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{% if loop.last and system is defined %}
{{ '[INST] ' ~ system ~ '\n\n' ~ message.content ~ '[/INST]' }}
{%- else %}{{ '[INST] ' ~ message.content ~ '[/INST]' }}
{%- endif %}
{% elif message.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{ call.function | tojson ~ (', ' if not loop.last else ']') }}
{%- endfor %}
{{ eos_token }}
{%- elif message.role == 'assistant' %}{{ ' ' ~ message.content | trim ~ eos_token }}
{%- elif message.role == 'tool' %}
{{ '[TOOL_RESULTS] {"content": ' ~ message.content | tojson ~ '}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('unknown role') }}{% endif %}
{% endfor %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}
{% endif %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<start_of_turn>' ~ role ~ '\n' ~ message.content | trim ~ '<end_of_turn>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
PHI3 = """{% for message in messages %}
{% if message.role in ('system', 'user', 'assistant') %}
{{ '<|' ~ message.role ~ '|>\n' ~ message.content ~ '<|end|>\n' }}
{%- endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
R1 = """{% set ns = namespace(first=true, system='', results=false) %}
{% for message in messages %}{% if message.role == 'system' %}{% set ns.system = message.content %}
{% endif %}{% endfor %}
{{ bos_token ~ ns.system }}
{%- for message in messages %}
{% if message.role == 'user' %}{{ '<｜User｜>' ~ message.content }}
{%- elif message.role == 'assistant' and message.tool_calls %}{% set ns.results = false %}
{% for call in message.tool_calls %}
{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' if loop.first else '\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{ '<｜tool▁calls▁end｜>' ~ eos_token }}
{%- elif message.role == 'assistant' %}
{% set content = message.content.split('</think>')[-1] %}
{% if ns.results %}{% set ns.results = false %}
{{ '<｜tool▁outputs▁end｜>' ~ content ~ eos_token }}
{%- else %}{{ '<｜Assistant｜>' ~ content ~ eos_token }}{% endif %}
{% elif message.role == 'tool' %}
{{ '<｜tool▁outputs▁begin｜>' if not ns.results else '\n' }}{% set ns.results = true %}
{{- '<｜tool▁output▁begin｜>' ~ message.content ~ '<｜tool▁output▁end｜>' }}
{%- endif %}
{% endfor %}
{% if ns.results %}{{ '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""
GPT_OSS = """{%- macro types(tools) %}{% for tool in tools %}
{{- 'type ' ~ tool.function.name ~ ' = (_: ' ~ tool.function.parameters | tojson ~ ') => any;\n' }}
{%- endfor %}{% endmacro -%}
{{ '<|start|>system<|message|>Reasoning: medium\n# Valid channels: analysis, commentary, final.' }}
{{- '<|end|>' }}
{%- set told = messages[0].content if messages[0].role in ('system', 'developer') else '' %}
{% set rest = messages[1:] if messages[0].role in ('system', 'developer') else messages %}
{% if told or tools %}{{ '<|start|>developer<|message|>' }}
{%- if told %}{{ '# Instructions\n\n' ~ told }}{% endif %}
{% if tools %}{{ '# Tools\n\nnamespace functions {\n' ~ types(tools) ~ '}' }}{% endif %}
{{ '<|end|>' }}{% endif %}
{% set ns = namespace(called='') %}
{% for message in rest %}
{% if message.role == 'assistant' %}
{% if message.tool_calls %}
{% set ns.called = message.tool_calls[0].function.name %}
{% if message.thinking %}
{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' }}
{%- endif %}
{{ '<|start|>assistant to=functions.' ~ ns.called ~ '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson ~ '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}{% set ns.called = '' %}
{% if message.thinking %}
{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' }}
{%- endif %}
{{ '<|start|>assistant<|channel|>final<|message|>' ~ message.content ~ '<|return|>' }}
{%- else %}{% set ns.called = '' %}
{{ '<|start|>assistant<|channel|>final<|message|>' ~ message.content ~ '<|end|>' }}
{%- endif %}
{% elif message.role == 'tool' %}
{% if not ns.called %}{{ raise_exception('a tool role without a call before it') }}{% endif %}
{{ '<|start|>functions.' ~ ns.called ~ ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson ~ '<|end|>' }}
{%- elif message.role == 'user' %}{{ '<|start|>user<|message|>' ~ message.content ~ '<|end|>' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
ZEPHYR = """{% for message in messages %}
{% if message.role in ('user', 'system', 'assistant') %}
{{ '<|' ~ message.role ~ '|>\n' ~ message.content ~ eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
COMMAND_R = """{{ bos_token }}
{%- for message in messages %}
{% set names = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT', 'tool': 'SYSTEM'} %}
{{ '<|START_OF_TURN_TOKEN|><|' ~ names[message.role] ~ '_TOKEN|>' }}
{%- if message.role == 'tool' %}{{ '<results>\n' ~ message.content ~ '\n</results>' }}
{%- elif message.tool_calls %}{{ 'Action: ```json\n[\n' }}
{%- for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ '\n]\n```' }}
{%- else %}{{ message.content.strip() }}{% endif %}
{{ '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""
SMOLLM3 = """{% for message in messages %}
{% if message.role == 'assistant' %}
{{ '<|im_start|>assistant\n' }}
{%- generation %}
{{- message.content if message.content is string else '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' ~ call.function | tojson ~ '</tool_call>' }}
{%- endfor %}
{{ '<|im_end|>' }}
{%- endgeneration %}
{{ '\n' }}
{%- else %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
VICUNA = """{{ 'A chat between a user and an assistant. ' }}
{%- for message in messages %}
{% if message.role == 'user' %}{{ 'USER: ' ~ message.content ~ ' ' }}
{%- elif message.role == 'assistant' %}{{ 'ASSISTANT: ' ~ message.content ~ eos_token }}
{%- endif %}{% endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
GRANITE = """{% for message in messages %}
{% if message.role == 'assistant' and message.tool_calls %}
{{ '<|start_of_role|>assistant<|end_of_role|>' ~ (message.content or '') ~ '<|tool_call|>' }}
{{- message.tool_calls | map(attribute='function') | list | tojson }}
{%- else %}
{{ '<|start_of_role|>' ~ message.role ~ '<|end_of_role|>' ~ message.content }}
{%- endif %}
{{ '<|end_of_text|>' }}{{ '\n' if not loop.last or add_generation_prompt }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

S = {"bos_token": "<s>", "eos_token": "</s>"}
EOT, IM = "<|eot_id|>", "<|im_end|>\n"
ARGUMENTS = '{"town": "Ulm"}'
PUBLISHED = {
    "Qwen2.5": Published(
        QWEN25,
        plain=("4" + IM, "6, not 7" + IM),
        calls=(f"<tool_call>\n{CALL}\n</tool_call>{IM}", "It is 9." + IM),
    ),
    "Qwen3": Published(
        QWEN3,
        plain=("4" + IM, "<think>\n\n</think>\n\n6, not 7" + IM),
        calls=(f"<tool_call>\n{CALL}\n</tool_call>{IM}", "<think>\n\n</think>\n\nIt is 9." + IM),
    ),
    "Llama 2": Published(LLAMA2, S, plain=(" 4 </s>", " 6, not 7 </s>")),
    "Llama 3": Published(
        LLAMA3, {"bos_token": "<|begin_of_text|>"}, plain=("4" + EOT, "6, not 7" + EOT)
    ),
    "Llama 3, which always asks": Published(
        ALWAYS_ASKS, {"bos_token": "<|begin_of_text|>"}, plain=("4" + EOT, "6, not 7" + EOT)
    ),
    "Llama 3.1": Published(
        LLAMA31,
        {"bos_token": "<|begin_of_text|>"},
        plain=("4" + EOT, "6, not 7" + EOT),
        calls=(f'{{"name": "weather", "parameters": {ARGUMENTS}}}{EOT}', "It is 9." + EOT),
    ),
    "Mistral": Published(
        MISTRAL,
        S,
        plain=(" 4</s>", " 6, not 7</s>"),
        calls=(f"[TOOL_CALLS] [{CALL}]</s>", " It is 9.</s>"),
    ),
    "Gemma": Published(
        GEMMA,
        {"bos_token": "<bos>"},
        plain=("4<end_of_turn>\n", "6, not 7<end_of_turn>\n"),
        system=False,
    ),
    "Phi-3": Published(
        PHI3, {"eos_token": "<|endoftext|>"}, plain=("4<|end|>\n", "6, not 7<|end|>\n<|endoftext|>")
    ),
    "DeepSeek-R1": Published(
        R1,
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        plain=("4<｜end▁of▁sentence｜>", "6, not 7<｜end▁of▁sentence｜>"),
        calls=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            + ARGUMENTS
            + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "It is 9.<｜end▁of▁sentence｜>",
        ),
    ),
    "gpt-oss": Published(
        GPT_OSS,
        plain=(
            "<|channel|>final<|message|>4<|end|>",
            "<|channel|>final<|message|>6, not 7<|return|>",
        ),
        calls=(
            f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
            "<|channel|>final<|message|>It is 9.<|return|>",
        ),
    ),
    "Zephyr": Published(ZEPHYR, S, plain=("4</s>\n", "6, not 7</s>\n")),
    "Command R": Published(
        COMMAND_R,
        {"bos_token": "<BOS_TOKEN>"},
        plain=("4<|END_OF_TURN_TOKEN|>", "6, not 7<|END_OF_TURN_TOKEN|>"),
        calls=(
            f"Action: ```json\n[\n{CALL}\n]\n```<|END_OF_TURN_TOKEN|>",
            "It is 9.<|END_OF_TURN_TOKEN|>",
        ),
    ),
    "SmolLM3": Published(
        SMOLLM3,
        plain=("4<|im_end|>", "6, not 7<|im_end|>"),
        calls=(f"<tool_call>{CALL}</tool_call><|im_end|>", "It is 9.<|im_end|>"),
    ),
    "Vicuna": Published(VICUNA, S, plain=(" 4</s>", " 6, not 7</s>")),
    "Granite": Published(
        GRANITE,
        plain=("4<|end_of_text|>", "6, not 7<|end_of_text|>"),
        calls=(f"<|tool_call|>[{CALL}]<|end_of_text|>", "It is 9.<|end_of_text|>"),
    ),
}
