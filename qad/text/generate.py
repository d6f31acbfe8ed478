"""Text that the BF16 original writes itself: data for distillation where the original's own is not at hand.

RUN/text/ROLE/documents.jsonl   one object a line: prompt (how many of the ids were given), ids

A stage like any other: kept, and reused while model, prompts and settings are the same. One that holds too little is continued,
not made again; an interrupted one goes on where it stopped.

Sampling is exact and has no state: the next token is the argmax of log p + Gumbel noise, and every document draws its noise
from a generator seeded by (seed, role, number of the document). So a document does not depend on the batch it is in, but for
rounding.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qad.artifact import Artifact, open_artifact, run_stage
from qad.errors import ArtifactError, DataError
from qad.model.source import Checkpoint
from qad.progress import Progress
from qad.text.chat import encode_chat
from qad.text.data import Generations
from qad.text.documents import Document, Part, digest_documents, generator_of, shuffled
from qad.text.packing import encode
from qad.text.sources import Need
from qad.untrusted import json_lines

KIND = "text"
_FILE = "documents.jsonl"
_ROUNDS = 8


class TeacherText:
    """Makes the documents of `source: teacher`. `load` gives the model, once, when something is to be written."""

    def __init__(
        self, checkpoint: Checkpoint, tokenizer: Any, seed: int, folder: Path, load: Callable[[], Any], dtype: str
    ) -> None:
        self._checkpoint, self._tokenizer, self._seed, self._folder = checkpoint, tokenizer, seed, folder
        self._load, self._dtype = load, dtype
        self._model: Any = None

    def __call__(
        self, settings: Generations, prompts: list[Document] | None, need: Need, number: int, taken: set[str]
    ) -> list[Document]:
        """Documents that give what is needed, without those whose key is in `taken`.

        Raises DataError where the prompts do not suffice, or the model keeps writing the same.
        """
        out = self._folder / (need.role if number == 0 else f"{need.role}-{number}")
        wanted = need.tokens
        for _ in range(_ROUNDS):
            folder = self._stage(settings, prompts, need, wanted, number, out).path
            kept, tokens = _first(_read(folder / _FILE), need, taken)
            if tokens >= need.tokens:
                return kept
            wanted += need.tokens - tokens
        raise DataError(
            f"the teacher keeps writing the same {need.role} documents ({tokens:,} tokens of {need.tokens:,} differ): "
            "raise temperature or give prompts"
        )

    def _stage(
        self, settings: Generations, prompts: list[Document] | None, need: Need, wanted: int, number: int, out: Path
    ) -> Artifact:
        """The finished stage that holds `wanted` useful tokens or more."""
        config = {
            **settings.model_dump(mode="json", exclude={"weight", "batch_size", "prompts"}),
            "role": need.role,
            "number": number,
            "longest": need.longest,
            "shortest": need.shortest,
            "seed": self._seed,
            "dtype": self._dtype,
        }
        inputs = {"source": self._checkpoint.digest, "prompts": digest_documents([Part("", 1.0, prompts or [])])}
        found = _same(out, config, inputs)
        if found and found.config["tokens"] >= wanted:
            return found

        def work(folder: Path) -> None:
            file = folder / _FILE
            if not file.exists() and found:
                file.write_bytes((found.path / _FILE).read_bytes())
            with _lines(file).open("a", encoding="utf-8") as lines:
                for doc in self._documents(settings, prompts, need, wanted, number, list(_read(file))):
                    lines.write(json.dumps({"prompt": doc.prompt, "ids": doc.ids}) + "\n")
                    lines.flush()

        return run_stage(KIND, out, {**config, "tokens": wanted}, inputs, work, resumable=True, replace=True)

    def _documents(
        self, settings: Generations, prompts: list[Document] | None, need: Need, wanted: int, number: int, done: list[Document]
    ) -> Iterator[Document]:
        """What is still to be written behind `done`."""
        tokens, made = sum(need.useful(len(doc.ids or ())) for doc in done), len(done)
        queue = itertools.islice(self._prompts(settings, prompts), made, None)
        with Progress(f"generate {need.role}", wanted, "tok", tokens) as bar:
            while tokens < wanted:
                batch = list(itertools.islice(queue, settings.batch_size))
                if not batch or made > 64 + wanted:
                    raise DataError(
                        f"{need.role}: {made} generations have {tokens:,} tokens, {wanted:,} needed: give more prompts, "
                        "raise length or ask for fewer"
                    )
                seeds = [f"{self._seed} {number} {need.role} {made + i}" for i in range(len(batch))]
                for prompt, ids in zip(batch, self._write(settings, batch, seeds), strict=True):
                    yield Document.of_ids(prompt + ids, prompt=len(prompt))
                    useful = need.useful(len(prompt) + len(ids))
                    tokens, made = tokens + useful, made + 1
                    bar.update(useful)

    def _prompts(self, settings: Generations, prompts: list[Document] | None) -> Iterator[list[int]]:
        """Token ids to go on from, in a stable order; those that leave no room for `length` tokens are left out."""
        model = self._loaded()
        if prompts is None:
            bos = next((i for i in _ids(self._tokenizer, model, "bos_token_id")), None)
            if bos is None:
                raise DataError("the model has no BOS token to write from: give the teacher prompts")
            yield from itertools.repeat([bos])
            return
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None) or torch.inf
        for doc in shuffled(prompts, self._seed):
            ids = prompt_ids(self._tokenizer, doc, settings.prompt_tokens)
            if len(ids) + settings.length <= room:
                yield ids

    def _loaded(self) -> Any:
        if self._model is None:
            self._model = self._load()
        return self._model

    @torch.no_grad()
    def _write(self, settings: Generations, prompts: list[list[int]], seeds: list[str]) -> list[list[int]]:
        """What the model writes after each prompt, its end-of-text token included. The model's own generation settings
        (temperature, penalties) play no part."""
        from transformers import GenerationConfig, LogitsProcessorList
        from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        model = self._loaded()
        ends = _ids(self._tokenizer, model, "eos_token_id")
        pad = next(iter([*_ids(self._tokenizer, model, "pad_token_id"), *ends]), 0)
        processors: list[object] = [TemperatureLogitsWarper(settings.temperature)]
        processors += [TopKLogitsWarper(settings.top_k)] if settings.top_k else []
        processors += [TopPLogitsWarper(settings.top_p)] if settings.top_p < 1 else []
        processors.append(GumbelNoise(seeds, str(model.device)))
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        own, model.generation_config = (model.generation_config, GenerationConfig(pad_token_id=pad, eos_token_id=ends or None))
        try:
            written = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=settings.length,
                do_sample=False,
                logits_processor=LogitsProcessorList(processors),
            )
        finally:
            model.generation_config = own
        return [_until(row, ends) for row in written[:, longest:].tolist()]


class GumbelNoise:
    """Adds Gumbel noise to log probabilities, so that their argmax is a sample. One generator a row."""

    def __init__(self, seeds: Sequence[str], device: str) -> None:
        self._generators = [generator_of(seed, device) for seed in seeds]

    def __call__(self, input_ids_BT: Tensor, scores_BV: Tensor) -> Tensor:
        exponential_BV = torch.stack(
            [
                torch.empty_like(scores_V, dtype=torch.float32).exponential_(generator=generator)
                for scores_V, generator in zip(scores_BV, self._generators, strict=True)
            ]
        )
        return scores_BV - exponential_BV.clamp_min(torch.finfo(torch.float32).tiny).log()


def prompt_ids(tokenizer: Any, doc: Document, tokens: int) -> list[int]:
    """The first `tokens` tokens of a text, or a conversation up to its first answer, ready to be answered.

    Raises DataError for a conversation that begins with the answer.
    """
    if doc.messages is None:
        return encode(tokenizer, doc)[:tokens]
    if doc.pictures:
        raise DataError(f"{doc.where}: the conversation shows images, and the teacher answers text alone: leave it out")
    asked = list(itertools.takewhile(lambda message: message["role"] != "assistant", doc.messages))
    if not asked:
        raise DataError(f"{doc.where}: the conversation begins with the assistant, so there is nothing to answer")
    return encode_chat(tokenizer, asked, doc.where, doc.given, answer=True)


def _first(docs: Iterator[Document], need: Need, taken: set[str]) -> tuple[list[Document], int]:
    """The first documents that together give what is needed, each once, and their tokens."""
    kept: dict[str, Document] = {}
    tokens = 0
    for doc in docs:
        useful = need.useful(len(doc.ids or ()))
        if useful and doc.key not in taken and doc.key not in kept:
            kept[doc.key] = doc
            tokens += useful
            if tokens >= need.tokens:
                break
    return list(kept.values()), tokens


def _same(out: Path, config: dict[str, object], inputs: dict[str, str]) -> Artifact | None:
    """A finished stage that differs in how many tokens it holds at most."""
    try:
        found = open_artifact(out, KIND)
    except ArtifactError:
        return None
    held = {key: value for key, value in found.config.items() if key != "tokens"}
    return found if held == config and found.manifest["inputs"] == inputs else None


def _lines(file: Path) -> Path:
    """The file without the line that a kill cut off."""
    content = file.read_bytes() if file.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        file.write_bytes(whole)
    return file


def _read(file: Path) -> Iterator[Document]:
    for _, row in json_lines(file):
        yield Document.of_ids(row["ids"], prompt=row["prompt"])


def _ids(tokenizer: Any, model: Any, name: str) -> list[int]:
    """Special token ids by the first that knows them: generation config, tokenizer, model config."""
    for holder in (model.generation_config, tokenizer, model.config):
        value = getattr(holder, name, None)
        if value is not None:
            return list(value) if isinstance(value, (list, tuple)) else [value]
    return []


def _until(ids: list[int], ends: list[int]) -> list[int]:
    stop = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]
