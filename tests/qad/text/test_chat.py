"""What the assistant says, token by token, on the usual kinds of chat template; where it cannot be told, a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qad.errors import DataError
from qad.model.loader import load_tokenizer
from qad.text.chat import encode_chat, encode_supervised
from qad.text.conversations import messages_of

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}<|endoftext|>{% endif %}{% endfor %}"
)
MARKED = (  # marks the words alone: the end-of-turn lies outside
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
)
MARKED_WIDE = (  # marks the line break after the end-of-turn as well
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{%- generation -%}{{ m['content'] }}"
    "<|im_end|>\n{%- endgeneration -%}{{ '\n' }}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
FORGETFUL = (  # drops the thinking of every answer but the last, as reasoning models' templates do
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADLESS = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

SPECIAL = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<bos>"]
TURNS = [
    {"role": "user", "content": "How many sacks?"},
    {"role": "assistant", "content": "Seven sacks,\nor eight."},
    {"role": "user", "content": "And the ducks?"},
    {"role": "assistant", "content": "Fed."},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Any:
    made = load_tokenizer(tiny_llama_dir)
    made.add_tokens(SPECIAL, special_tokens=True)
    made.bos_token = "<bos>"
    return made


def with_template(tokenizer: Any, template: str) -> Any:
    tokenizer.chat_template = template
    return tokenizer


def require(tokenizer: Any, messages: list[dict[str, str]], expected: list[tuple[str, bool]]) -> None:
    """Each token, decoded alone, lies inside one expected piece and has its supervision."""
    ids, supervised = encode_supervised(tokenizer, messages, "x")
    text = "".join(piece for piece, _ in expected)
    wanted = [learned for piece, learned in expected for _ in piece]
    place = 0
    for token, learned in zip(ids, supervised, strict=True):
        piece = tokenizer.decode([token])
        assert text[place : place + len(piece)] == piece
        assert set(wanted[place : place + len(piece)]) == {learned}, (piece, place)
        place += len(piece)
    assert place == len(text)
    assert ids == encode_chat(tokenizer, messages, "x")


def test_chatml_with_a_system_prompt_that_the_template_adds(tokenizer: Any) -> None:
    require(
        with_template(tokenizer, CHATML),
        TURNS,
        [
            (
                "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHow many sacks?<|im_end|>\n<|im_start|>assistant\n",
                False,
            ),
            ("Seven sacks,\nor eight.<|im_end|>", True),
            ("\n<|im_start|>user\nAnd the ducks?<|im_end|>\n<|im_start|>assistant\n", False),
            ("Fed.<|im_end|>", True),
            ("\n", False),
        ],
    )


def test_chatml_with_a_system_prompt_of_its_own(tokenizer: Any) -> None:
    require(
        with_template(tokenizer, CHATML),
        [{"role": "system", "content": "Be brief."}, *TURNS[:2]],
        [
            (
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow many sacks?<|im_end|>\n<|im_start|>assistant\n",
                False,
            ),
            ("Seven sacks,\nor eight.<|im_end|>", True),
            ("\n", False),
        ],
    )


def test_llama_3(tokenizer: Any) -> None:
    require(
        with_template(tokenizer, LLAMA3),
        TURNS,
        [
            (
                "<bos><|start_header_id|>user<|end_header_id|>\n\nHow many sacks?<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                False,
            ),
            ("Seven sacks,\nor eight.<|eot_id|>", True),
            (
                "<|start_header_id|>user<|end_header_id|>\n\nAnd the ducks?<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                False,
            ),
            ("Fed.<|eot_id|>", True),
        ],
    )


def test_gemma(tokenizer: Any) -> None:
    require(
        with_template(tokenizer, GEMMA),
        TURNS,
        [
            ("<bos><start_of_turn>user\nHow many sacks?<end_of_turn>\n<start_of_turn>model\n", False),
            ("Seven sacks,\nor eight.<end_of_turn>", True),
            ("\n<start_of_turn>user\nAnd the ducks?<end_of_turn>\n<start_of_turn>model\n", False),
            ("Fed.<end_of_turn>", True),
            ("\n", False),
        ],
    )


def test_a_template_whose_answers_have_no_header(tokenizer: Any) -> None:
    require(
        with_template(tokenizer, MISTRAL),
        TURNS[:2],
        [("<bos>[INST] How many sacks? [/INST]", False), (" Seven sacks,\nor eight.<|endoftext|>", True)],
    )


@pytest.mark.parametrize("template", [MARKED, MARKED_WIDE], ids=["words", "line break too"])
def test_marks_count_and_the_end_of_turn_is_taken_in_and_white_space_left_out(tokenizer: Any, template: str) -> None:
    require(
        with_template(tokenizer, template),
        TURNS,
        [
            ("<|im_start|>user\nHow many sacks?<|im_end|>\n<|im_start|>assistant\n", False),
            ("Seven sacks,\nor eight.<|im_end|>", True),
            ("\n<|im_start|>user\nAnd the ducks?<|im_end|>\n<|im_start|>assistant\n", False),
            ("Fed.<|im_end|>", True),
            ("\n", False),
        ],
    )


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WIDE], ids=["prefixes", "marks", "wide marks"])
def test_an_answer_of_weight_0_is_context_and_not_in_the_loss(tokenizer: Any, template: str) -> None:
    shows_all = template.replace("{{ m['role'] }}", "{{ m['role'] }}{{ m['weight'] }}")  # which no server gives it
    found = []
    for weights in ((1, 1), (0, 1), (1, 0), (0, 0)):
        rows = [{**turn, "weight": weights[i // 2]} if i % 2 else turn for i, turn in enumerate(TURNS)]
        ids, learned = encode_supervised(with_template(tokenizer, shows_all), messages_of(rows, "x", "m"), "x")
        assert ids == encode_chat(tokenizer, TURNS, "x")
        found.append(tokenizer.decode([i for i, told in zip(ids, learned, strict=True) if told]))
    first, second = "Seven sacks,\nor eight.<|im_end|>", "Fed.<|im_end|>"
    assert found == [first + second, second, first, ""]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "tool_calls"])
@pytest.mark.parametrize(
    "template",
    [CHATML, MARKED, "{% if enable_thinking and reasoning_effort %}{% endif %}" + CHATML],
    ids=["prefixes", "marks", "a word that holds the key"],
)
def test_thinking_that_the_template_drops_is_refused(tokenizer: Any, template: str, key: str) -> None:
    turns = [TURNS[0], {**TURNS[1], key: "He counts."}]
    for encode in (encode_supervised, encode_chat):
        with pytest.raises(DataError, match=f"a message has '{key}', which the model's chat template does not show"):
            encode(with_template(tokenizer, template), turns, "x")
        encode(tokenizer, [TURNS[0], {**TURNS[1], key: ""}], "x")
    shown = template.replace("{{ m['content'] }}", "{{ m.get('" + key + "', '') }}{{ m['content'] }}")
    assert "He counts.Seven sacks" in tokenizer.decode(encode_chat(with_template(tokenizer, shown), turns, "x"))


def test_weights_under_marks_of_pieces_of_an_answer_are_refused(tokenizer: Any) -> None:
    words = "{% generation %}{{ m['content'] }}{% endgeneration %}"
    tokenizer.chat_template = MARKED.replace(words, words + "{% generation %}!{% endgeneration %}")
    with pytest.raises(DataError, match="marks 4 pieces of 2 answers"):
        encode_supervised(tokenizer, [TURNS[0], {**TURNS[1], "weight": 0}, *TURNS[2:]], "x")


def test_a_template_that_drops_earlier_thinking_is_refused_but_for_a_single_answer(tokenizer: Any) -> None:
    thinking = [{**m, "content": f"<think>hm</think>{m['content']}"} if m["role"] == "assistant" else m for m in TURNS]
    with pytest.raises(DataError, match="chats line 3: the chat template renders message 2 differently"):
        encode_supervised(with_template(tokenizer, FORGETFUL), thinking, "chats line 3")
    require(
        tokenizer,
        thinking[:2],
        [
            ("<|im_start|>user\nHow many sacks?<|im_end|>\n<|im_start|>assistant\n", False),
            ("<think>hm</think>Seven sacks,\nor eight.<|im_end|>", True),
            ("\n", False),
        ],
    )


def test_a_template_without_generation_prompt_is_refused_lest_headers_count(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="has no generation prompt"):
        encode_supervised(with_template(tokenizer, HEADLESS), TURNS, "x")


def test_a_conversation_that_begins_with_the_assistant_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="begins with the assistant"):
        encode_supervised(with_template(tokenizer, CHATML), TURNS[1:], "x")


def test_a_conversation_without_an_answer_has_nothing_to_learn(tokenizer: Any) -> None:
    for template in (CHATML, MARKED):
        _, supervised = encode_supervised(with_template(tokenizer, template), TURNS[:1], "x")
        assert not any(supervised)


def test_content_of_several_bytes_and_spaces_at_the_edges_keep_their_tokens(tokenizer: Any) -> None:
    messages = [TURNS[0], {"role": "assistant", "content": "  größer — 鴨  "}]
    ids, supervised = encode_supervised(with_template(tokenizer, CHATML), messages, "x")
    learned = tokenizer.decode([i for i, s in zip(ids, supervised, strict=True) if s])
    assert learned == "  größer — 鴨  <|im_end|>"


def test_the_template_alone_writes_bos(tokenizer: Any) -> None:
    ids = encode_chat(with_template(tokenizer, LLAMA3), TURNS, "x")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_no_template_and_a_template_that_raises_are_one_line_each(tokenizer: Any) -> None:
    for template, message in (
        (None, "has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation .roles must alternate"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            encode_supervised(with_template(tokenizer, template), TURNS, "x")  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False
        chat_template = CHATML

    with pytest.raises(DataError, match="Slow has no character offsets"):
        encode_supervised(Slow(), TURNS, "x")
