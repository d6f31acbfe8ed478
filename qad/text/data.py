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
    """weight: share of the tokens, relative to the other sources of a blend."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class _Documents(_Source):
    """split: `auto` gives each role its own share of the documents by content hash (calibration 10 %, train 70 %,
    validation 10 %, test 10 %); `all` takes every document for the role that names it."""

    split: Literal["auto", "all"] = "auto"


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

    @property
    def name(self) -> str:
        return Path(self.path).name


class JsonLines(_Documents):
    """One JSON object a line. Its `field` holds the document: text, or a conversation (a list of objects with `role` and
    `content`), which is rendered through the model's chat template."""

    source: Literal["jsonl"]
    path: str
    field: str = "text"

    @property
    def name(self) -> str:
        return Path(self.path).name


class Hub(_Documents):
    """A data set that the `datasets` library opens: a hub name or a local folder. Each row's `field` is a document, as for
    jsonl. hub_split: the data set's own split, a slice allowed (`train[:20000]`). No code of the data set is run."""

    source: Literal["hub"]
    path: str
    config: str | None = None
    revision: str | None = None
    hub_split: str = "train"
    field: str = "text"

    @property
    def name(self) -> str:
        return Path(self.path).name if self.path.count("/") != 1 or Path(self.path).is_dir() else self.path


class RandomTokens(_Source):
    """Documents of `length` random token ids, special tokens left out; as many as are needed, other ones for each role."""

    source: Literal["random"]
    length: Positive = 512

    @property
    def name(self) -> str:
        return "random tokens"


Prompts = Annotated[PythonDocs | TextFile | JsonLines | Hub, Discriminator("source")]


def _short(value: Any) -> Any:
    """`python-docs`, `notes.txt`, `chat.jsonl` for short."""
    if not isinstance(value, str):
        return value
    if value == "python-docs":
        return {"source": value}
    return {"source": "jsonl" if value.endswith((".jsonl", ".json")) else "text", "path": value}


class Generations(_Source):
    """Text that the BF16 original writes, as much as is needed, kept in RUN/text. The prompts are the first prompt_tokens
    tokens of each document of `prompts`, or its messages up to the first answer; without prompts it writes from the BOS
    token alone. length: tokens to write at most. Sampled at `temperature`, from the top_k tokens (0: all) that make up
    probability top_p; every document has a seed of its own, so batch_size matters for speed only."""

    source: Literal["teacher"]
    prompts: Annotated[Prompts, BeforeValidator(_short)] | None = None
    prompt_tokens: Positive = 32
    length: Positive = 512
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    batch_size: Positive = 8

    @property
    def name(self) -> str:
        return f"generations from {self.prompts.name if self.prompts else 'BOS'}"


Source = PythonDocs | TextFile | JsonLines | Hub | RandomTokens | Generations
SOURCES: dict[str, type[BaseModel]] = {get_args(s.model_fields["source"].annotation)[0]: s for s in get_args(Source)}


def _as_list(value: Any) -> Any:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [_short(one) for one in values]


_Sources = Annotated[
    tuple[Annotated[Source, Discriminator("source")], ...], BeforeValidator(_as_list), Field(min_length=1)
]


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
