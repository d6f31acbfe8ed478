"""`data:` of a recipe: where text comes from. One source, or a list of sources with weights.

data: python-docs                                     the standard library's documentation
data: notes.txt                                       a file; blank lines separate documents
data: {source: jsonl, path: chats.jsonl, field: messages}
data:
  - {source: hub, path: owner/name, hub_split: "train[:20000]", weight: 3}
  - {source: teacher, prompts: python-docs, weight: 1}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, RootModel

Positive = Annotated[int, Field(gt=0)]


class _Source(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    weight: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """share of the tokens, relative to the other sources of a list"""


class _Documents(_Source):
    split: Literal["auto", "all"] = "auto"
    """auto: calibration 10 %, train 70 %, validation 10 %, test 10 % of the documents, by hash; all: every one"""


class PythonDocs(_Documents):
    """The language reference and the docstrings of the standard library of the running Python."""

    source: Literal["python-docs"]

    @property
    def name(self) -> str:
        return self.source


class TextFile(_Documents):
    """A UTF-8 file; blank lines separate documents."""

    source: Literal["text"]
    path: str
    """the file"""

    @property
    def name(self) -> str:
        return Path(self.path).name


class JsonLines(_Documents):
    """One JSON object a line."""

    source: Literal["jsonl"]
    path: str
    """the file"""
    field: str = "text"
    """holds the document: text, or a conversation (objects with role and content), rendered by the chat template"""

    @property
    def name(self) -> str:
        return Path(self.path).name


class Hub(_Documents):
    """A data set that the `datasets` library opens. No code of it is run."""

    source: Literal["hub"]
    path: str
    """hub name or local folder"""
    config: str | None = None
    """the data set's own configuration"""
    revision: str | None = None
    """commit, branch or tag"""
    hub_split: str = "train"
    """the data set's own split; a slice is allowed, such as train[:20000]"""
    field: str = "text"
    """holds the document, as for jsonl"""

    @property
    def name(self) -> str:
        return Path(self.path).name if self.path.count("/") != 1 or Path(self.path).is_dir() else self.path


class RandomTokens(_Source):
    """Random token ids, special tokens left out; as many documents as are needed, other ones for each role."""

    source: Literal["random"]
    length: Positive = 512
    """tokens of a document"""

    @property
    def name(self) -> str:
        return "random tokens"


Prompts = Annotated[PythonDocs | TextFile | JsonLines | Hub, Discriminator("source")]


def _short(value: object) -> Any:
    """`python-docs`, `notes.txt`, `chat.jsonl` for short."""
    if not isinstance(value, str):
        return value
    if value == "python-docs":
        return {"source": value}
    return {"source": "jsonl" if value.endswith((".jsonl", ".json")) else "text", "path": value}


class Generations(_Source):
    """Text that the BF16 original writes, as much as is needed, kept in RUN/text. Every document has a seed of its own."""

    source: Literal["teacher"]
    prompts: Annotated[Prompts, BeforeValidator(_short)] | None = None
    """a source whose documents begin the text: prompt_tokens of it, or messages up to the first answer; none: BOS alone"""
    prompt_tokens: Positive = 32
    """tokens taken from a prompt that is text"""
    length: Positive = 512
    """tokens to write at most"""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """of sampling"""
    top_k: Annotated[int, Field(ge=0)] = 0
    """sample from so many likeliest tokens; 0 is all"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """sample from the tokens that make up this probability"""
    batch_size: Positive = 8
    """documents at a time; matters for speed only"""

    @property
    def name(self) -> str:
        return f"generations from {self.prompts.name if self.prompts else 'BOS'}"


Source = PythonDocs | TextFile | JsonLines | Hub | RandomTokens | Generations
SOURCES: dict[str, type[BaseModel]] = {get_args(s.model_fields["source"].annotation)[0]: s for s in get_args(Source)}


def _as_list(value: object) -> Any:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [_short(one) for one in values]


_Sources = Annotated[tuple[Annotated[Source, Discriminator("source")], ...], BeforeValidator(_as_list), Field(min_length=1)]


class Data(RootModel[_Sources]):
    """One or more sources. A lone source may be written without the list."""

    model_config = ConfigDict(frozen=True)

    @property
    def name(self) -> str:
        """What to call it in reports: never a whole path."""
        return " + ".join(self.names)

    @property
    def names(self) -> Sequence[str]:
        """One name a source, told apart where two would be the same."""
        names: list[str] = []
        for source in self.root:
            same = sum(name.split(" #")[0] == source.name for name in names)
            names.append(f"{source.name} #{same + 1}" if same else source.name)
        return names
