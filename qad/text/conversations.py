"""A row of conversations -> what a server would hand to the chat template: messages, tools and the template's other arguments.

Rows are written as requests to an OpenAI server are, and servers change some of it before the template sees it:

    tool_calls[].function.arguments    a JSON string -> the object it writes; none or empty -> {}
    tool_calls: []                     left out
    content: null beside tool_calls    ""
    content: a list of parts that are text    their texts, a line break between them, as vLLM has it; with images it stays a list
    weight: 0    not shown to the template; the turn is not in the loss (OpenAI's, Mistral's and axolotl's fine-tuning rows)
    tools, documents, chat_template_kwargs, reasoning_effort of the row    arguments of the template

What a server would refuse, or has no place for, is refused here: it cannot be what the model will be served with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qad.errors import DataError
from qad.untrusted import mapping, strict_json

_OLD = {"functions": "tools", "function_call": "tool_calls"}  # of OpenAI's first form, which servers ignore

_OURS = ("add_generation_prompt", "chat_template", "continue_final_message", "messages", "tokenize")  # decided elsewhere

_ROLES = ("assistant", "developer", "system", "tool", "user")


def messages_of(value: Sequence[Any], where: str, field: str) -> list[dict[str, Any]]:
    """Messages without the keys that are null. Raises DataError for what is no message."""
    messages = []
    for number, message in enumerate(value, 1):
        held = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        at = f"{where}: message {number} of {field!r}"
        if isinstance(held.get("content"), list):
            held["content"] = _parts(held["content"], at)
        if not isinstance(held.get("role"), str) or not isinstance(held.get("content", ""), (str, list)):
            written = (
                ": it is written as from and value; rename them, human to user and gpt to assistant" if "from" in held else ""
            )
            raise DataError(f"{at} is not an object with role and content as text{written}")
        if (known := held["role"].strip().lower()) != held["role"] and known in _ROLES:  # templates compare to the letter
            raise DataError(f"{at} has the role {held['role']!r}, which templates know as {known!r}: write it so")
        _require_new_form(held, at)
        _weigh(held, at)
        if held.get("tool_calls") == []:
            del held["tool_calls"]
        if "tool_calls" in held:
            held = {"role": held["role"], "content": "", **held, "tool_calls": _calls(held["tool_calls"], at)}
        if "content" not in held:
            raise DataError(f"{at} has no content")
        messages.append(held)
    if not messages:
        raise DataError(f"{where}: field {field!r} holds no message")
    return messages


def given_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The template's other arguments, from the columns beside the messages; a column that is null is absent.

    Raises DataError for tools in another form than servers take, and for arguments that are no objects.
    """
    _require_new_form(row, where)
    given = dict(mapping(_decoded(row.get("chat_template_kwargs"), where, "chat_template_kwargs", dict)))
    for key in _OURS:
        if key in given:
            raise DataError(f"{where}: chat_template_kwargs has {key!r}, which is not a row's to decide: leave it out")
    if isinstance(row.get("reasoning_effort"), str):
        given["reasoning_effort"] = row["reasoning_effort"]
    for key in ("tools", "documents"):
        held = _decoded(row.get(key), where, key, list)
        if not held:
            continue
        for number, one in enumerate(held, 1):
            if not isinstance(one, dict) or (key == "tools" and not _names_a_function(one)):
                form = '{"type": "function", "function": {"name": ...}}' if key == "tools" else "an object"
                raise DataError(f"{where}: {key} {number} is not {form}, as servers take it: rewrite it, or drop {key!r}")
        given[key] = held
    return given


def without_nulls(value: Any) -> Any:
    """The value without keys that are null, at any depth: Arrow gives every object the keys of all objects in its place."""
    if isinstance(value, dict):
        return {key: without_nulls(held) for key, held in value.items() if held is not None}
    return [without_nulls(held) for held in value] if isinstance(value, list) else value


def _parts(value: list[Any], at: str) -> str | list[dict[str, str]]:
    """Parts of text and images; text alone where there is no image. Raises DataError for other parts."""
    parts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        key = {"text": "text", "image": "path"}.get(str(kind))
        if key is None or not isinstance(part.get(key), str):
            raise DataError(
                f"{at}: a part of its content is {str(part)[:80]!r}, expected "
                '{"type": "text", "text": ...} or {"type": "image", "path": FILE}; nothing is fetched, no row holds an image'
            )
        parts.append({"type": str(kind), key: part[key]})
    images = any(part["type"] == "image" for part in parts)
    return parts if images else "\n".join(part["text"] for part in parts)


def _calls(value: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise DataError(f"{at}: tool_calls is {type(value).__name__}, expected a list")
    calls = []
    for call in value:
        if not isinstance(call, dict) or not _names_a_function(call):
            raise DataError(f'{at}: a tool call is not {{"type": "function", "function": {{"name", "arguments"}}}}')
        given = call["function"].get("arguments")
        arguments = _decoded(given, at, "the arguments of a tool call", dict) or {}
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return calls


def _weigh(held: dict[str, Any], at: str) -> None:
    """Keeps a weight of 0 alone, which is what `encode_supervised` asks for. Raises DataError for other weights, and for other
    words of the same meaning, which every tool spells its own way."""
    weight = held.pop("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"{at} has the weight {str(weight)[:40]!r}, expected 0 (not in the loss) or 1")
    if weight == 0:
        held["weight"] = 0
    for other in ("train", "training"):
        if held.get(other) is False:
            raise DataError(f"{at} has {other!r}: false, which is not read here: write it as 'weight': 0")


def _names_a_function(value: Mapping[str, Any]) -> bool:
    return value.get("type", "function") == "function" and isinstance(mapping(value.get("function")).get("name"), str)


def _decoded(value: Any, where: str, what: str, kind: type) -> Any:
    """The value, or what it writes as JSON; None where it is null or empty. Raises DataError for another type than `kind`."""
    if isinstance(value, str) and value.strip():
        try:
            value = strict_json(value)
        except ValueError as error:
            raise DataError(f"{where}: {what} is a string that is not JSON ({error})") from error
    if value is None or value == "":
        return None
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "an object"
        raise DataError(f"{where}: {what} is {type(value).__name__}, expected {expected}, or one written as JSON")
    return value


def _require_new_form(held: Mapping[str, Any], at: str) -> None:
    for old, new in _OLD.items():
        if held.get(old):
            raise DataError(f"{at} has {old!r}, which servers do not show the model: write it as {new!r}")
