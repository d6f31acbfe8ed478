"""What a model that sees is given of a conversation: ids, and whatever else its processor makes of the images.

The chat template writes one placeholder an image. The processor replaces it by as many tokens as the image takes, and makes the
other inputs of the model (pixel_values, image_grid_thw, mm_token_type_ids ...). They travel as a mapping of tensors, whatever
they are called: those shaped like the ids are cut and padded as these are, the others go as they come.

Shape suffixes: B windows, T tokens of a window, b those of them that show images, L tokens of the longest conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from qad.errors import DataError, UsageError
from qad.text.chat import Span, inside, render, supervised_text, texts_of
from qad.text.documents import Document, Part
from qad.text.pictures import Picture
from qad.text.processor import load_processor, processor_digest


@dataclasses.dataclass(frozen=True)
class Shown:
    """A conversation as a processor takes it: rendered text and the images of its placeholders, in order."""

    text: str
    pictures: tuple[Picture, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Shown:
        return cls(raw["text"], tuple(Picture(**one) for one in raw["pictures"]))


@dataclasses.dataclass(frozen=True)
class Seen:
    """A sequence that shows images. text_T: bool [T], False for the tokens of images. inputs: what the model is given beside the
    ids, made when asked for."""

    text_T: Tensor
    inputs: Callable[[], Mapping[str, Tensor]]


class Sight:
    """A model's processor: conversations with images -> ids and whatever else the model is given."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.digest = processor_digest(folder)
        self._processor = load_processor(folder, tokenizer)

    def encode(
        self, tokenizer: Any, doc: Document, seq_len: int, loss_on: Literal["text", "assistant"] = "text"
    ) -> tuple[list[int], list[bool], Shown]:
        """Token ids, at most seq_len; for each whether it is text, or what the assistant says of it; and what the processor is
        given again when the document is used.

        Raises DataError where the processor refuses the conversation, its template shows less than it says, or its images do not
        fit.
        """
        assert doc.messages is not None
        if loss_on == "assistant":
            text, spans = supervised_text(tokenizer, doc.messages, doc.where, doc.given)
        else:
            text = render(tokenizer, doc.messages, doc.where, doc.given)
            spans = [(0, len(text))]
        _require_said(doc, text)
        shown = Shown(text, doc.pictures)
        out = self._call([shown], doc.where, return_offsets_mapping=True, return_text_replacement_offsets=True)
        if "offset_mapping" not in out or "text_replacement_offsets" not in out:
            raise UsageError(f"{type(self._processor).__name__} does not tell where its images are: use a newer transformers")
        ids, offsets = list(out["input_ids"][0]), out["offset_mapping"][0]
        replaced = out["text_replacement_offsets"][0]
        of_image = inside(offsets, [tuple(one["new_span"]) for one in replaced])
        said = inside(offsets, [_moved(span, replaced) for span in spans])
        needed = max((i + 1 for i, image in enumerate(of_image) if image), default=0)
        if needed > seq_len:
            raise DataError(
                f"{doc.where}: its images take {needed:,} tokens with what stands before them, and a window has {seq_len:,}: "
                "make them smaller, raise seq_len or leave it out"
            )
        counted = [one and not image for one, image in zip(said, of_image, strict=True)]
        return ids[:seq_len], counted[:seq_len], shown

    def sequence(self, tokenizer: Any, doc: Document, seq_len: int) -> tuple[Tensor, Seen]:
        """int64 [T] ids of a document, cut at seq_len, and what goes with them. Raises DataError as `encode`."""
        ids, text, shown = self.encode(tokenizer, doc, seq_len)
        ids_T = torch.tensor(ids)
        return ids_T, Seen(torch.tensor(text), lambda: self.inputs([shown], ids_T[None]))

    def inputs(self, shown: Sequence[Shown | None], input_ids_BT: Tensor) -> dict[str, Tensor]:
        """What the model is given beside the ids of these windows. Empty where no window shows an image.

        Raises DataError where the processor makes other ids of a conversation than are in its window.
        """
        rows = [row for row, one in enumerate(shown) if one is not None]
        if not rows:
            return {}
        held = [one for one in shown if one is not None]
        out = self._call(held, held[0].pictures[0].path, padding=True, padding_side="right", return_tensors="pt")
        ids_bL, mask_bL = out.pop("input_ids"), out.pop("attention_mask").bool()
        length = min(ids_bL.shape[1], input_ids_BT.shape[1])
        if not torch.equal(ids_bL[:, :length][mask_bL[:, :length]], input_ids_BT[rows, :length][mask_bL[:, :length]]):
            raise DataError("the processor makes other tokens of an image than it did when the text was packed: start again")
        inputs: dict[str, Tensor] = {}
        for name, value in out.items():
            if value.shape == ids_bL.shape:  # of every token
                inputs[name] = value.new_zeros(input_ids_BT.shape)
                inputs[name][rows, :length] = value[:, :length]
            else:
                inputs[name] = value
        return inputs

    def _call(self, shown: Sequence[Shown], where: str, **asked: Any) -> Any:
        images = [[picture.open() for picture in one.pictures] for one in shown]
        try:
            return self._processor(text=[one.text for one in shown], images=images, add_special_tokens=False, **asked)
        except (ValueError, TypeError, IndexError, StopIteration, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"{where}: the model's processor refuses this conversation ({reason}): mend it or leave it out"
            ) from error


def sight_for(parts: Iterable[Part], folder: Path, tokenizer: Any) -> Sight | None:
    """The processor of the model in `folder`, where any document shows an image. Raises as `load_processor`."""
    shows = any(document.pictures for part in parts for document in part.documents)
    return Sight(folder, tokenizer) if shows else None


def _moved(span: Span, replaced: Sequence[Mapping[str, Any]]) -> Span:
    """A span of the rendered text, in the text whose placeholders are replaced."""

    def place(at: int) -> int:
        longer = [len(one["replacement"]) - (one["span"][1] - one["span"][0]) for one in replaced if one["span"][1] <= at]
        return at + sum(longer)

    return place(span[0]), place(span[1])


def _require_said(doc: Document, text: str) -> None:
    """A template that takes strings alone leaves parts out without a word, and one that takes parts alone leaves out strings."""
    for number, message in enumerate(doc.messages or (), 1):
        lost = next((said for said in texts_of(message) if said.strip() not in text), None)
        if lost is not None:
            form = "a text" if isinstance(message.get("content"), list) else '[{"type": "text", "text": ...}]'
            raise DataError(
                f"{doc.where}: the model's chat template does not show {lost[:40]!r} of message {number}: write its content "
                f"as {form}"
            )
