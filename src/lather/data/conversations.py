"""Reads conversations from records: their messages, their tools, and which answers are learned.

Published data sets have different shapes: messages of role and content, ShareGPT's of from and
value, prompts with completions, and the instructions, inputs and outputs of Alpaca. All become the
messages that transformers' chat templates take; keys that are not read here are passed on to the
template.
"""

from __future__ import annotations

import json
from typing import Any

Messages = list[dict[str, Any]]
Tools = list[Any] | None
FIELDS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "history",
    "system",
    "tools",
    "functions",
)
"""The fields of a record that are read."""
UNREAD_FIELDS = ("images", "image", "videos", "audios", "documents", "chat_template_kwargs")
"""Fields of published data sets beside the messages that are part of a conversation and are not
read; those are noted. All others are passed over, such as numbers and sources of records."""
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "tool_response": "tool",
}
"""Names of roles in published data sets, and their standard names."""
CALL_ROLES = ("function_call", "tool_call")
"""Roles of messages whose text is a call of a tool, in JSON."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages have their reasoning; templates are given each of the first two."""
LEARNED_MARKS = ("weight", "loss_weight", "loss_scale", "loss", "loss_mask", "train", "training")
"""Keys of a message that say whether it is learned: 1 or true, or else 0 or false."""
MASKED_MARKS = ("masked",)
"""Keys of a message that say the opposite."""
UNREAD_MARKS = ("train_detail", "mask")
"""Keys of a message that say which parts of it are learned, and are not read."""


class ChatError(Exception):
    """The record is not a conversation; the message says why."""


def messages_of(record: dict[str, Any]) -> Messages:
    """Read the messages of a record.

    They are a list "messages" or "conversations" of objects with role and content (or from and
    value), or the fields "prompt" and "completion", or Alpaca's "instruction" and "output" with
    "input" and "history". A field "system" is put before them. Raises ChatError.
    """
    record = {name: value for name, value in record.items() if value is not None}
    messages = [_message(item, number) for number, item in enumerate(_items(record))]
    system = record.get("system", "")
    if not isinstance(system, str):
        raise ChatError(f"system is {type(system).__name__}, not text")
    if system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if system.strip() and messages[0].get("content") != system:
        raise ChatError("it has a field system and another system message")
    return _with_calls_joined(messages)


def tools_of(record: dict[str, Any]) -> Tools:
    """Read the tools of a record, given as a list or as JSON; "functions", an older name, are tools
    as well. Raises ChatError."""
    name = "functions" if record.get("tools") is None and record.get("functions") else "tools"
    tools = record.get(name)
    if isinstance(tools, str) and tools.strip():
        tools = _of_json(tools, f"{name} is not JSON")
    if tools and not isinstance(tools, list):
        raise ChatError(f"{name} is {type(tools).__name__}, not a list")
    if name == "functions":
        return [{"type": "function", "function": function} for function in tools or []]
    return tools or None


def _of_json(text: str, fault: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"{fault}: {error}") from None


def unread_fields(record: dict[str, Any]) -> list[str]:
    """Return the fields of a record that belong to the conversation, and are not read."""
    return [name for name in UNREAD_FIELDS if record.get(name) not in (None, "", [], {})]


def is_learned(message: dict[str, Any], number: int) -> bool | None:
    """Tell whether the marks of message `number` say that it is learned; None if it has no mark.
    Raises ChatError if a mark is neither true nor false."""
    for name in UNREAD_MARKS:
        if message.get(name) not in (None, [], ""):
            marks = ", ".join(LEARNED_MARKS)
            raise ChatError(f"message {number} has {name}, which is not read: give one of {marks}")
    verdicts = []
    for name in (*LEARNED_MARKS, *MASKED_MARKS):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            fault = f"message {number} has {name} = {value!r}"
            raise ChatError(f"{fault}: give 0 or 1, or true or false")
        verdicts.append(bool(value) != (name in MASKED_MARKS))
    return all(verdicts) if verdicts else None


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions that the message calls, each an object with name and arguments."""
    calls, older = message.get("tool_calls"), message.get("function_call")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [*([older] if isinstance(older, dict) else []), *map(_function, calls)]


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """Return the function of a call: of its key "function", or the call itself."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def length_of(value: Any) -> int:
    """Return about how many characters messages have, or the texts in another value of JSON."""
    if isinstance(value, str):
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(length_of, items))


# --- the shapes of records ----------------------------------------------------------------------


def _items(record: dict[str, Any]) -> list[Any]:
    """Return the messages of a record without nulls, unchecked. Raises ChatError."""
    for name in ("messages", "conversations"):
        if name in record:
            if not isinstance(record[name], list) or not record[name]:
                raise ChatError(f"{name} is not a list of messages")
            return list(record[name])
    if "prompt" in record and "completion" in record:
        prompt = _part(record["prompt"], "prompt", "user")
        return [*prompt, *_part(record["completion"], "completion", "assistant")]
    if "instruction" in record and "output" in record:
        return _alpaca(record)
    fields = ", ".join(map(str, record)) or "nothing"
    known = "neither messages nor prompt and completion nor instruction and output"
    raise ChatError(f"{known}, but {fields}")


def _part(value: Any, name: str, role: str) -> list[Any]:
    """Return the messages of a prompt or completion: the text of one message, or a list of them."""
    if not isinstance(value, str | list) or value == []:
        raise ChatError(f"{name} is {type(value).__name__}, not text or a list of messages")
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _alpaca(record: dict[str, Any]) -> list[Any]:
    """Return the messages of an instruction, its input (after a line's end) and its output, after
    those of the history, a list of pairs of texts."""
    texts = {name: record.get(name, "") for name in ("instruction", "input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ChatError(f"{name} is {type(text).__name__}, not text")
    history = record.get("history", [])
    pairs = history if isinstance(history, list) else [None]
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ChatError("history is not a list of pairs of texts")
    asked = "\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    return [
        {"role": role, "content": content}
        for pair in [*pairs, [asked, texts["output"]]]
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]


def _message(item: Any, number: int) -> dict[str, Any]:
    """Return a message with its standard role. Raises ChatError if it is not valid."""
    if not isinstance(item, dict):
        raise ChatError(f"message {number} is not an object")
    message = dict(item)
    if message.get("role") is None and "from" in message:
        message["role"] = message.pop("from")
        if "value" in message:
            message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str):
        raise ChatError(f"message {number} has no role")
    if message["role"] in CALL_ROLES:
        return _call_message(message, number)
    message["role"] = ROLES.get(message["role"], message["role"])
    if message.get("tool_calls"):
        message["tool_calls"] = _calls(message["tool_calls"], number)
    content = message.get("content")
    if isinstance(content, list):
        _check_parts(content, number)
    elif not isinstance(content, str):
        others = ("tool_calls", "function_call", *REASONING)
        is_call = message["role"] == "assistant" and any(message.get(name) for name in others)
        if content is not None or not is_call:
            raise ChatError(f"message {number} has no text as content")
    return message


def _calls(calls: Any, number: int) -> list[Any]:
    """Return the calls of a message, given as a list or as JSON. Raises ChatError."""
    if isinstance(calls, str):
        calls = _of_json(calls, f"message {number} has tool_calls that are no JSON")
    if not isinstance(calls, list):
        raise ChatError(f"message {number} has tool_calls that are no list of calls")
    for call in calls:
        if not isinstance(call, dict) or not isinstance(_function(call).get("name"), str):
            raise ChatError(f"message {number} has a call without a name")
    return calls


def _check_parts(parts: list[Any], number: int) -> None:
    """Raise ChatError if content given as a list has other parts than texts."""
    for part in parts:
        if not isinstance(part, dict):
            raise ChatError(f"message {number} has a part of content that is not an object")
        if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type", "no type")
            raise ChatError(f"message {number} has a part of type {kind}: only texts are read")


def _call_message(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the assistant's message that makes the calls which the content has as JSON."""
    role, calls = message["role"], message.pop("content", None)
    fault = f"message {number} of role {role} is not a call in JSON, with a name"
    calls = _of_json(calls, fault) if isinstance(calls, str) else calls
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ChatError(fault)
    tool_calls = [{"type": "function", "function": call} for call in calls]
    return {**message, "role": "assistant", "tool_calls": tool_calls, _CALL: True}


_CALL = "\0call"
"""Key of messages made of `CALL_ROLES`, until those that follow each other are joined."""


def _with_calls_joined(messages: Messages) -> Messages:
    """Join calls that follow each other to a message, as the calls of an answer."""
    joined: Messages = []
    for message in messages:
        before = joined[-1] if joined else {}
        calls = [*(before.get("tool_calls") or ()), *(message.get("tool_calls") or ())]
        together = {**message, "tool_calls": calls}
        if message.get(_CALL) and {**before, "tool_calls": calls} == together:
            joined[-1] = together
        else:
            joined.append(message)
    return [{name: value for name, value in message.items() if name != _CALL} for message in joined]
