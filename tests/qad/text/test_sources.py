"""Every source becomes documents, or one line that says why not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from qad.errors import DataError, QadError, UsageError
from qad.model.loader import load_tokenizer
from qad.text.data import Data, JsonLines, PythonDocs, TextFile
from qad.text.documents import ROLES, Document, require_disjoint, split_of
from qad.text.python_docs import python_docs
from qad.text.sources import Need, Reader, documents, require_readable

CHAT = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven."}]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def json_lines(path: Path, **fields: Any) -> JsonLines:
    return JsonLines(source="jsonl", path=str(path), **fields)


@pytest.fixture(scope="session")
def tokenizer(tiny_llama_dir: Path) -> Any:
    return load_tokenizer(tiny_llama_dir)


def test_the_python_docs_split_into_four_disjoint_roles() -> None:
    data, reader = Data.model_validate("python-docs"), Reader()
    splits = {role: reader.parts(data, Need(role, 1)) for role in ROLES}
    require_disjoint(splits)
    sizes = {role: len(parts[0].documents) for role, parts in splits.items()}
    assert sizes["train"] > 5 * sizes["test"] > 0
    assert min(sizes.values()) > 50
    assert documents(PythonDocs(source="python-docs"), "test") == splits["test"][0].documents


def test_docstrings_are_found_wherever_a_statement_may_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of a walk by levels, in every kind of block, and never in expressions."""
    doc = '"""{0} ' + "words " * 40 + '"""'
    code = [
        doc.format("module"),
        "try:",
        "  class A:",
        "    " + doc.format("A"),
        "    def a(self):",
        "      " + doc.format("a"),
        "except E:",
        "  def handler():",
        "    " + doc.format("handler"),
        "else:",
        "  async def other():",
        "    " + doc.format("other"),
        "finally:",
        "  def last():",
        "    " + doc.format("last"),
        "match x:",
        "  case 1:",
        "    def case():",
        "      " + doc.format("case"),
        "f = lambda: " + doc.format("no"),
        "def f():",
        "  " + doc.format("f"),
        "for i in x:",
        "  pass",
        "else:",
        "  def loop():",
        "    " + doc.format("loop"),
    ]
    (tmp_path / "m.py").write_text("\n".join(code))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text(doc.format("skipped"))
    (tmp_path / "broken.py").write_text("def (")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    found = [text.split()[0] for text in python_docs.__wrapped__()]
    assert found == ["module", "f", "A", "other", "last", "loop", "a", "handler", "case"]


def test_repeated_documents_count_once(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", *[{"text": "the same words"}] * 5)
    assert len(documents(json_lines(path, split="all"), "train")) == 1


def test_conversations_are_read_with_their_place(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"messages": CHAT}, {"messages": CHAT[:1]})
    first, second = documents(json_lines(path, field="messages", split="all"), "train")
    assert first.messages == tuple(CHAT)
    assert first.key == Document.of_messages(CHAT).key
    assert second.where == f"{path} line 2"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "holds no text"),
        ("blank.txt", "\n \n\n", "holds no text"),
        ("bad.jsonl", "{\n", "line 1 is not JSON"),
        ("list.jsonl", "[1]\n", "line 1: expected an object with the field 'text'"),
        ("field.jsonl", '{"messages": []}\n', "line 1: expected an object with the field 'text': it has messages; set field"),
        ("type.jsonl", '{"text": 3}\n', "is int, expected text or a list of messages"),
        ("half.jsonl", '{"text": "a \\ud83d b"}\n', "line 1: its text holds half a character"),
        ("said.jsonl", '{"text": [{"role": "user", "content": "\\ude00"}]}\n', "line 1: its text holds half a character"),
        ("whole.jsonl", '{"text": "\\ud83d\\ude00"}\n{', "line 2 is not JSON"),
        ("none.jsonl", '{"text": []}\n', "holds no message"),
        ("role.jsonl", '{"text": [{"content": "x"}]}\n', "message 1 of 'text' is not an object with role and content"),
        ("image.jsonl", '{"text": [{"role": "user", "content": [1]}]}\n', "a part of its content is '1', expected"),
        (
            "web.jsonl",
            '{"text": [{"role": "user", "content": [{"type": "image_url"}]}]}\n',
            "a part of its content is .*nothing is fetched",
        ),
        ("content.jsonl", '{"text": [{"role": "user", "content": null}]}\n', "message 1 of 'text' has no content"),
    ],
)
def test_unusable_text_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    text = name.endswith(".txt")
    source = TextFile(source="text", path=str(path), split="all") if text else json_lines(path, split="all")
    with pytest.raises(DataError, match=message) as caught:
        documents(source, "train")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        documents(TextFile(source="text", path=str(tmp_path / "none.txt")), "train")
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        documents(TextFile(source="text", path=str(tmp_path / "x.txt")), "train")


def test_a_role_without_any_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("only one document here\n")
    empty = next(role for role in ROLES if role != split_of(Document.of("only one document here")))
    with pytest.raises(DataError, match=f"{empty} split"):
        documents(TextFile(source="text", path=str(path)), empty)


def test_a_line_separator_inside_a_json_string_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one\u2028two"}\n', encoding="utf-8")
    assert [d.text for d in documents(json_lines(path, split="all"), "train")] == ["one\u2028two"]


# --- the datasets library ---


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("_own_cache")
def test_a_folder_of_data_files_and_a_saved_data_set_open_alike(tmp_path: Path) -> None:
    import datasets

    rows = [{"messages": CHAT, "id": 1}, {"messages": [{**CHAT[0], "name": "me"}], "id": 2}]
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "validation.jsonl", *rows)
    held = datasets.Dataset.from_list(rows)
    held.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"validation": held}).save_to_disk(str(tmp_path / "dict"))
    for name in ("files", "one", "dict"):
        data = Data.model_validate(
            {"source": "hub", "path": str(tmp_path / name), "hub_split": "validation", "field": "messages", "split": "all"}
        )
        (part,) = Reader().parts(data, Need("train", 1))
        assert part.name == name
        assert [d.messages for d in part.documents] == [tuple(CHAT), ({**CHAT[0], "name": "me"},)]
        assert part.documents[0].where == f"{name} row 1"


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hub_split": "test"}, "cannot be opened .*test"),
        ({"field": "words"}, "row 1: expected an object with the field 'words': it has text; set field"),
        ({"path": "nobody/nothing-of-that-name"}, "nobody/nothing-of-that-name cannot be opened"),
    ],
)
def test_a_data_set_that_does_not_open_is_one_line(tmp_path: Path, fields: dict[str, str], message: str) -> None:
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", {"text": "x"})
    data = Data.model_validate({"source": "hub", "path": str(tmp_path / "files"), "split": "all", **fields})
    with pytest.raises(DataError, match=message) as caught:
        Reader().parts(data, Need("train", 1))
    assert "\n" not in str(caught.value)


def test_without_the_datasets_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'nvfp4-qad\[data\]'"):
        Reader().parts(Data.model_validate({"source": "hub", "path": "owner/name"}), Need("train", 1))


# --- random tokens ---


def test_random_tokens_are_ordinary_ones_and_other_ones_for_each_role(tokenizer: Any) -> None:
    data = Data.model_validate({"source": "random", "length": 20})
    special = {tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    splits = {role: Reader(tokenizer, 0).parts(data, Need(role, 50_000)) for role in ROLES}
    require_disjoint(splits)
    docs = splits["train"][0].documents
    assert [len(d.ids or ()) for d in docs] == [20] * 2500
    drawn = {i for d in docs for i in d.ids or ()}
    assert drawn == set(range(len(tokenizer))) - special
    again = Reader(tokenizer, 0).parts(data, Need("train", 40))[0].documents
    assert again == docs[:2]  # a longer text begins with the shorter one
    assert Reader(tokenizer, 1).parts(data, Need("train", 40))[0].documents != again


def test_random_documents_too_short_to_be_measured_are_refused(tokenizer: Any) -> None:
    data = Data.model_validate({"source": "random", "length": 20})
    with pytest.raises(DataError, match="set length to 32"):
        Reader(tokenizer).parts(data, Need("test", 100, longest=64, shortest=32))


# --- blends ---


def test_a_blend_asks_each_source_for_its_share_and_repeats_nothing(tmp_path: Path, tokenizer: Any) -> None:
    file = {
        "source": "jsonl",
        "path": str(write(tmp_path / "x.jsonl", *({"text": f"text {i}"} for i in range(9)))),
        "split": "all",
    }
    data = Data.model_validate([{"source": "random", "length": 10, "weight": 3}, file, {**file, "weight": 2}])
    random, first, second = Reader(tokenizer).parts(data, Need("train", 1000))
    assert [(p.name, p.weight) for p in (random, first, second)] == [("random tokens", 3), ("x.jsonl", 1), ("x.jsonl #2", 2)]
    assert len(random.documents) == 50
    assert (len(first.documents), len(second.documents)) == (9, 0)


def test_generations_need_a_run_to_be_kept_in() -> None:
    with pytest.raises(QadError, match="source teacher is for recipes"):
        Reader().parts(Data.model_validate({"source": "teacher"}), Need("test", 10))


def test_what_the_teacher_is_to_go_on_from_is_read_before_it_writes(tmp_path: Path) -> None:
    missing = {"source": "text", "path": str(tmp_path / "none.txt")}
    for data in ({"source": "teacher", "prompts": missing}, [{"source": "teacher"}, {"source": "random"}, missing]):
        with pytest.raises(DataError, match=r"none\.txt cannot be read"):
            require_readable(Data.model_validate(data), "train")
    require_readable(Data.model_validate([{"source": "teacher"}, {"source": "random"}]), "train")
