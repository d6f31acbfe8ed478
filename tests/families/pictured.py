"""Tiny models that see, with a processor and rows of small generated images, made without a hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_families
import torch

_TEXT = "The heron stands in the river and waits for a fish; how deep is the water at bank 3? " * 3
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{%% for m in messages %%}<|im_start|>{{ m['role'] }}\n{%% if m['content'] is string %%}{{ m['content'] }}{%% else %%}"
    "{%% for part in m['content'] %%}{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}"
    "{%% endfor %%}{%% endif %%}<|im_end|>\n{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


def _tokenizer(folder: Path, placeholder: str, *image_tokens: str, **named: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(unk_token=None))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*_SPECIAL, *image_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([_TEXT] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<|im_start|>",
        extra_special_tokens=named or None,
    )
    tokenizer.chat_template = _TEMPLATE % placeholder
    tokenizer.save_pretrained(folder)
    return tokenizer


def _qwen(folder: Path) -> tuple[Any, dict[str, int]]:
    from transformers import Qwen2VLImageProcessorPil

    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = _tokenizer(folder, "<|vision_start|><|image_pad|><|vision_end|>", *names)
    image, video, start, end = tokenizer.convert_tokens_to_ids(list(names))
    ids = {"image_token_id": image, "video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end}
    return Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 4 * 28 * 28}, patch_size=14), ids


def _gemma(folder: Path) -> tuple[Any, dict[str, int]]:
    from transformers import Gemma3ImageProcessorPil

    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(folder, "<start_of_image>", *named.values(), **named)
    boi, eoi, image = tokenizer.convert_tokens_to_ids(list(named.values()))
    ids = {"boi_token_index": boi, "eoi_token_index": eoi, "image_token_index": image}
    return Gemma3ImageProcessorPil(size={"height": 28, "width": 28}), ids


def _smol(folder: Path) -> tuple[Any, dict[str, int]]:
    from transformers import SmolVLMImageProcessorPil

    names = ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>")
    tokenizer = _tokenizer(folder, "<image>", *names)
    made = SmolVLMImageProcessorPil(
        size={"longest_edge": 28}, max_image_size={"longest_edge": 28}, do_image_splitting=False, resample=1
    )
    return made, {"image_token_id": tokenizer.convert_tokens_to_ids("<image>")}


def _mistral(folder: Path) -> tuple[Any, dict[str, int]]:
    from transformers import PixtralImageProcessorPil

    tokenizer = _tokenizer(folder, "[IMG]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    image = tokenizer.convert_tokens_to_ids("[IMG]")
    return PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=14), {"image_token_index": image}


# family -> image processor and the ids of image tokens; settings of the processor; what differs in the configuration
PICTURED: dict[str, tuple[Callable[[Path], tuple[Any, dict[str, int]]], dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-VL": (_qwen, {"processor_class": "Qwen2_5_VLProcessor"}, {}),
    "Qwen3-VL": (_qwen, {"processor_class": "Qwen3VLProcessor"}, {"vision_config": {"patch_size": 14}}),
    "Gemma3": (_gemma, {"processor_class": "Gemma3Processor", "image_seq_length": 4}, {}),
    "Mistral3": (_mistral, {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2}, {}),
    "SmolVLM": (_smol, {"processor_class": "SmolVLMProcessor", "image_seq_len": 1}, {}),
}


def build(name: str, folder: Path, seed: int = 0) -> Path:
    """Save a family's tiny BF16 instance with tokenizer and processor."""
    folder.mkdir(parents=True)
    make, settings, own = PICTURED[name]
    processor, ids = make(folder)
    processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(settings))
    config = tiny_families.config_of(name)
    for key, value in ids.items():
        setattr(config, key, value)
    for part, changed in own.items():
        for key, value in changed.items():
            setattr(getattr(config, part), key, value)
    return tiny_families.save(config, folder, seed)


def rows(folder: Path, count: int = 40, seed: int = 0) -> Path:
    """A data file of short conversations about small images, which lie beside it."""
    from PIL import Image

    (folder / "images").mkdir(parents=True)
    lines = []
    for number in range(count):
        generator = torch.Generator().manual_seed(seed + number)
        pixels = torch.randint(0, 256, (28 + 28 * (number % 2), 56 + number % 5, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(folder / "images" / f"{number}.png")
        asked = [{"type": "image", "path": f"images/{number}.png"}, {"type": "text", "text": f"How deep is river {number}?"}]
        answer = f"The water at bank {number % 7} is deep and the heron waits for a fish."
        lines.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"
