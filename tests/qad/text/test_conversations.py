"""A row with tools is trained on as a server would show it to the model, in every rendering; what no server takes is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qad.errors import DataError
from qad.model.loader import load_tokenizer
from qad.text.conversations import given_of, messages_of
from qad.text.data import Hub, JsonLines
from qad.text.documents import Document
from qad.text.generate import prompt_ids
from qad.text.packing import encode, encode_answers
from qad.text.sources import documents

HEAD = "{% if tools %}<|im_start|>system\nTools:{% for t in tools %} {{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
BODY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n@{{ '' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} CALL</call>{% endfor %}<|im_end|>\n@@{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if effort %}{{ effort }}{% endif %}{% endif %}"
)
CALLS = {
    "as JSON": "{{ c.function.arguments | tojson }}",  # Qwen2.5, Llama 3
    "as a mapping": "{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}",  # Qwen3-Coder, GLM
}
MARKS = ("{% if m['role'] == 'assistant' %}{% generation %}", "{% endgeneration %}{% endif %}")
TOOL = {"type": "function", "function": {"name": "heron_count", "parameters": {"properties": {"place": {"type": "string"}}}}}
ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "how many?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "id": "a", "function": {"name": "heron_count", "arguments": json.dumps({"place": "bank 3"})}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "7"},
        {"role": "assistant", "content": "seven herons"},
    ],
    "tools": [TOOL],
}


def template(call: str, marked: bool) -> str:
    """With marks, the whole of an assistant's turn behind its header is inside them."""
    body = HEAD + BODY.replace("CALL", CALLS[call])
    if not marked:
        return body.replace("@@", "").replace("@", "")
    said = body[body.index("@{{") + 1 : body.index("@@")]
    return body.replace(f"@{said}@@", f"{MARKS[0]}{said}{{% endgeneration %}}{{% else %}}{said}{{% endif %}}")


def served(row: dict[str, Any]) -> list[dict[str, Any]]:
    """As vLLM and SGLang hand it to the template."""
    messages = [dict(message) for message in row["messages"]]
    call = messages[1]["tool_calls"][0]
    function = {**call["function"], "arguments": {"place": "bank 3"}}
    messages[1] = {**messages[1], "content": "", "tool_calls": [{**call, "function": function}]}
    return messages


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Any:
    return load_tokenizer(tiny_llama_dir)


def document(row: dict[str, Any]) -> Document:
    return Document.of_messages(messages_of(row["messages"], "x", "messages"), "x", given_of(row, "x"))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("marked", [False, True], ids=["by prefixes", "by marks"])
def test_what_is_trained_on_is_what_is_served(tokenizer: Any, call: str, marked: bool) -> None:
    tokenizer.chat_template = template(call, marked)
    doc = document(ROW)
    text = tokenizer.apply_chat_template(served(ROW), tools=[TOOL], tokenize=False)
    assert '<|im_start|>system\nTools: {"type": "function"' in text
    assert tokenizer.decode(encode(tokenizer, doc)) == text
    ids, supervised = encode_answers(tokenizer, doc, "x")
    assert tokenizer.decode(ids) == text
    said = "".join(tokenizer.decode([i]) for i, learned in zip(ids, supervised, strict=True) if learned)
    called = '{"place": "bank 3"}' if call == "as JSON" else "<place>bank 3"
    assert said == f"<call>heron_count {called}</call><|im_end|>seven herons<|im_end|>"
    asked = tokenizer.apply_chat_template(served(ROW)[:1], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt_ids(tokenizer, doc, 8)) == asked


def test_a_tokenizer_with_a_template_for_tools_uses_it_where_there_are_tools(tokenizer: Any) -> None:
    tokenizer.chat_template = {"default": "{{ 'plain' }}", "tool_use": template("as JSON", False)}
    text = tokenizer.apply_chat_template(served(ROW), tools=[TOOL], tokenize=False)
    ids, supervised = encode_answers(tokenizer, document(ROW), "x")
    assert tokenizer.decode(ids) == text
    assert any(supervised)
    tokenizer.chat_template = {**tokenizer.chat_template, "tool_use": template("as JSON", True)}  # marks in one alone
    assert encode_answers(tokenizer, document(ROW), "x") == (ids, supervised)


def test_arguments_of_the_template_reach_every_rendering(tokenizer: Any) -> None:
    tokenizer.chat_template = template("as JSON", False)
    doc = document({**ROW, "chat_template_kwargs": '{"effort": "high "}'})
    assert tokenizer.decode(prompt_ids(tokenizer, doc, 8)).endswith("<|im_start|>assistant\nhigh ")


def test_columns_in_every_form_that_data_sets_have(tmp_path: Path) -> None:
    """Tools as JSON text; a call without arguments; null columns; no call at all."""
    assert given_of({"tools": json.dumps([TOOL])}, "x") == given_of({"tools": [TOOL]}, "x") == {"tools": [TOOL]}
    assert given_of({"tools": None, "documents": [], "chat_template_kwargs": None, "tools2": 1}, "x") == {}
    assert given_of({"documents": [{"text": "a"}], "reasoning_effort": "low"}, "x") == {
        "documents": [{"text": "a"}],
        "reasoning_effort": "low",
    }
    for empty in ("", None, {}, "{}"):
        call = {"function": {"name": "f", "arguments": empty}}
        (message,) = messages_of([{"role": "assistant", "tool_calls": [call]}], "x", "m")
        assert message == {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert messages_of([{"role": "assistant", "content": "a", "tool_calls": []}], "x", "m") == [
        {"role": "assistant", "content": "a"}
    ]


def test_arrow_fills_objects_with_the_keys_of_others_and_these_are_dropped(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    other = {"type": "function", "function": {"name": "mill", "parameters": {"properties": {"sacks": {"type": "integer"}}}}}
    rows = [ROW, {"messages": ROW["messages"][:1], "tools": [other]}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    hub = documents(Hub(source="hub", path=str(tmp_path / "set"), field="messages", split="all"), "train")
    plain = documents(JsonLines(source="jsonl", path=str(lines), field="messages", split="all"), "train")
    assert [doc.given for doc in hub] == [doc.given for doc in plain] == [{"tools": [TOOL]}, {"tools": [other]}]
    assert [(doc.key, doc.messages) for doc in hub] == [(doc.key, doc.messages) for doc in plain]


def test_tools_are_part_of_what_a_document_is() -> None:
    assert document(ROW).key != document({**ROW, "tools": None}).key
    assert document({**ROW, "tools": None}).key == Document.of_messages(messages_of(ROW["messages"], "x", "m")).key


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tools": "[{"}, "tools is a string that is not JSON"),
        ({"tools": {"name": "f"}}, "tools is dict, expected a list"),
        ({"tools": [{"name": "f", "parameters": {}}]}, "tools 1 is not {"),
        ({"documents": ["a"]}, "documents 1 is not an object"),
        ({"functions": [{"name": "f"}]}, "has 'functions', which servers do not show the model: write it as 'tools'"),
        ({"chat_template_kwargs": {"tokenize": True}}, "has 'tokenize', which is not a row's to decide"),
    ],
)
def test_columns_that_no_server_takes_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match="rows line 3") as refused:
        given_of(row, "rows line 3")
    assert message in str(refused.value)


def test_turns_of_sharegpt_are_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"message 1 of 'conversations' .* from and value; rename them, human to user"):
        messages_of([{"from": "human", "value": "Hello"}], "rows line 3", "conversations")


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "is a string that is not JSON"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "is list, expected an object"),
        ({"tool_calls": [{"name": "f", "arguments": {}}]}, "a tool call is not"),
        ({"tool_calls": {"name": "f"}}, "tool_calls is dict, expected a list"),
        ({"content": "", "function_call": {"name": "f"}}, "write it as 'tool_calls'"),
        ({}, "has no content"),
        ({"content": "", "weight": 0.5}, "has the weight '0.5', expected 0 (not in the loss) or 1"),
        ({"role": "Assistant", "content": "a"}, "has the role 'Assistant', which templates know as 'assistant'"),
        ({"role": "user ", "content": "a"}, "has the role 'user ', which templates know as 'user'"),
        ({"content": "", "train": False}, "has 'train': false, which is not read here: write it as 'weight': 0"),
    ],
)
def test_turns_that_no_server_takes_are_refused(turn: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match="rows line 3: message 1 of 'm'") as refused:
        messages_of([{"role": "assistant", **turn}], "rows line 3", "m")
    assert message in str(refused.value)
