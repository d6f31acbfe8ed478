"""Conversations through the tokenizer's own chat template, and which of their tokens the assistant says.

Where the template marks them ({% generation %}), the marks count. Where it does not, every assistant turn is found by rendering
prefixes of the conversation,

    whole      = render(all messages)
    before_i   = render(messages before turn i, with the generation prompt)
    upto_i     = render(messages up to and including turn i)

and the turn's span is [len(before_i), len(upto_i)), which is only true where before_i begins upto_i and upto_i begins whole.
Templates for which it is not (they drop earlier thinking, say) are refused, never guessed. White space that ends a span is not
supervised; the end-of-turn token before it is: without it the model would not learn to stop.

The template is given what a server gives it (qad.text.conversations), the same in every rendering. A turn of weight 0 is context,
not in the loss.

Spans are characters; a fast tokenizer's offsets map them to tokens. The template writes BOS where the model wants one, so
the tokenizer adds none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2

from qad.errors import DataError
from qad.text.documents import Message

_MARKED = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")
_THINKING = ("reasoning_content", "reasoning", "thinking")
Span = tuple[int, int]
Given = Mapping[str, object]
_NOTHING: Given = MappingProxyType({})


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], where: str, given: Given = _NOTHING, *, answer: bool = False
) -> list[int]:
    """Token ids of a conversation; with `answer`, followed by the generation prompt, so that a model answers next. given: tools
    and whatever else the template is given."""
    text = render(tokenizer, messages, where, given, generation_prompt=answer)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode_supervised(
    tokenizer: Any, messages: Sequence[Message], where: str, given: Given = _NOTHING
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and for each whether the assistant says it. Raises DataError as `supervised_text`."""
    text, spans = supervised_text(tokenizer, messages, where, given)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], inside(encoded["offset_mapping"], spans)


def supervised_text(
    tokenizer: Any, messages: Sequence[Message], where: str, given: Given = _NOTHING
) -> tuple[str, Sequence[Span]]:
    """The rendered conversation, and the spans of it that the assistant says.

    Raises DataError where that cannot be told: a slow tokenizer, or a template without marks whose renderings of a growing
    conversation do not continue each other.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{where}: {type(tokenizer).__name__} has no character offsets, which the assistant's tokens are found by: "
            "use a fast tokenizer (tokenizer.json) or train.loss_on: all"
        )
    template = _template(tokenizer, given) if tokenizer.chat_template else ""
    if _MARKED.search(template):
        _require_shown(template, messages, where, given)
        text, spans = _marked(tokenizer, template, messages, where, given)
    else:
        text = render(tokenizer, messages, where, given)
        spans = _prefix_spans(tokenizer, text, messages, where, given)
    return text, spans


def render(
    tokenizer: Any, messages: Sequence[Message], where: str, given: Given = _NOTHING, *, generation_prompt: bool = False
) -> str:
    """The conversation as text. Raises DataError where the tokenizer has no template or the template refuses it."""
    if not tokenizer.chat_template:
        raise DataError(f"{where}: the model's tokenizer has no chat template: use text, or a model that has one")
    _require_shown(_template(tokenizer, given), messages, where, given)
    try:
        text: str = tokenizer.apply_chat_template(
            _shown(messages), tokenize=False, add_generation_prompt=generation_prompt, **given
        )
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise _refused(error, where) from error
    return text


def _template(tokenizer: Any, given: Given) -> str:
    return str(tokenizer.get_chat_template(tools=given.get("tools")))


def _require_shown(template: str, messages: Sequence[Message], where: str, given: Given) -> None:
    """Thinking and tools reach the model only through a template that names their key; others drop them without a word."""
    asked = [(message, keys) for message in messages for keys in (_THINKING, ("tool_calls",))]
    for held in ([key for key in keys if row.get(key)] for row, keys in (*asked, (given, ("tools",)))):
        if held and not any(re.search(rf"(?<!\w){key}(?!\w)", template) for key in held):
            lost, holder = held[0], "the row" if held == ["tools"] else "a message"
            raise DataError(
                f"{where}: {holder} has {lost!r}, which the model's chat template does not show: it would be left out. Write it "
                f"into the content, give a model whose template shows it, or drop {lost!r}"
            )


def _marked(tokenizer: Any, template: str, messages: Sequence[Message], where: str, given: Given) -> tuple[str, list[Span]]:
    """Text and spans by the template's marks. Where they leave the end-of-turn out, it is taken in: it is what follows the
    last assistant turn when nothing comes after that turn."""
    text, marks = _render_marks(tokenizer, template, messages, where, given)
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None or not marks:
        return text, []
    ending, ended = _render_marks(tokenizer, template, messages[: last + 1], where, given)
    end_of_turn = ending[ended[-1][1] :].rstrip() if ended else ""
    spans = []
    for start, stop in _learnt(marks, messages, where):
        stop += len(end_of_turn) if text.startswith(end_of_turn, stop) else 0
        spans.append((start, start + len(text[start:stop].rstrip())))
    return text, spans


def _learnt(marks: Sequence[Span], messages: Sequence[Message], where: str) -> Sequence[Span]:
    """The marks of turns whose weight is not 0."""
    turns = [message for message in messages if message["role"] == "assistant"]
    if all(message.get("weight") != 0 for message in turns):
        return marks
    if len(marks) != len(turns):
        raise DataError(
            f"{where}: the chat template marks {len(marks)} pieces of {len(turns)} answers, so that none can be told by its "
            "weight: leave the weights out, or give a template with one mark an answer"
        )
    return [mark for mark, message in zip(marks, turns, strict=True) if message.get("weight") != 0]


def _shown(messages: Sequence[Message]) -> list[dict[str, object]]:
    """As a server hands them to the template, which no weight reaches."""
    return [{name: held for name, held in message.items() if name != "weight"} for message in messages]


def _render_marks(tokenizer: Any, template: str, messages: Sequence[Message], where: str, given: Given) -> tuple[str, list[Span]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, marks = render_jinja_template(
            conversations=[_shown(messages)],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **given},
        )
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise _refused(error, where) from error
    return texts[0], [(start, stop) for start, stop in marks[0]]


def _prefix_spans(tokenizer: Any, whole: str, messages: Sequence[Message], where: str, given: Given) -> list[Span]:
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i == 0:
            raise DataError(f"{where}: the conversation begins with the assistant, so nothing tells where its turn starts")
        before = render(tokenizer, messages[:i], where, given, generation_prompt=True)
        upto = render(tokenizer, messages[: i + 1], where, given)
        if not upto.startswith(before) or not whole.startswith(upto):
            raise DataError(
                f"{where}: the chat template renders message {i + 1} differently once more follows (it drops earlier "
                "thinking, or its generation prompt is not what precedes an answer), so the assistant's tokens cannot be "
                "told: give conversations of one answer, a template with {% generation %} marks, or train.loss_on: all"
            )
        answer = "".join(texts_of(message)).strip()
        silent = before == render(tokenizer, messages[:i], where, given)
        if silent and not upto[len(before) :].lstrip().startswith(answer):
            raise DataError(
                f"{where}: the chat template has no generation prompt, so its header would count as the assistant's words: "
                "give a template with {% generation %} marks, or train.loss_on: all"
            )
        if message.get("weight") != 0:
            spans.append((len(before), len(upto.rstrip())))
    return spans


def texts_of(message: Message) -> list[str]:
    """What a message says: its content, or the parts of it that are text."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def inside(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token starts inside a span. Tokenizers that trim offsets report a run of spaces as the empty range at its
    end: such a token stands for the character before."""
    starts = [start if stop > start else start - 1 for start, stop in offsets]
    return [any(first <= start < last for first, last in spans) for start in starts]


def _refused(error: Exception, where: str) -> DataError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return DataError(f"{where}: the chat template refuses this conversation ({lines[0]}): mend it or leave it out")
