"""Silent damage: whole and consistent, but not what was trained. Only a comparison with the arm can tell."""

from __future__ import annotations

import json
import random

import torch
from damaged_checkpoint import CONFIG, Checkpoint, Damage, inputs
from tensor_corruptions import change_whole_group, plain_names


def one_code(c: Checkpoint, r: random.Random) -> None:
    name = f"{r.choice(c.modules)}.{c.codes}"
    codes = c.get(name)
    codes.view(-1)[r.randrange(codes.numel())] ^= 1 << r.randrange(8)
    c.put(name, codes)


def one_block_scale(c: Checkpoint, r: random.Random) -> None:
    name = f"{r.choice(c.modules)}.{c.block_scale}"
    scale = c.get(name)
    flat = scale.view(torch.uint8).view(-1)
    place = r.randrange(flat.numel())
    flat[place] += -1 if int(flat[place]) > 1 else 1
    c.put(name, scale)


def nibbles_swapped(c: Checkpoint, r: random.Random) -> None:
    name = f"{r.choice(c.modules)}.{c.codes}"
    codes = c.get(name)
    c.put(name, (codes >> 4) | (codes << 4))


def rows_swapped(c: Checkpoint, r: random.Random) -> None:
    name = f"{r.choice(c.modules)}.{r.choice([c.codes, c.block_scale])}"
    tensor = c.get(name)
    bytes_ = tensor.view(torch.uint8)
    i, j = r.sample(range(len(tensor)), 2)
    while torch.equal(bytes_[i], bytes_[j]):
        i, j = r.sample(range(len(tensor)), 2)
    bytes_[[i, j]] = bytes_[[j, i]]
    c.put(name, tensor)


def layers_swapped(c: Checkpoint, r: random.Random) -> None:
    a = r.choice([m for m in c.modules if "layers.0." in m])
    b = a.replace("layers.0.", "layers.1.")
    left, right = (c.get(f"{m}.{c.codes}") for m in (a, b))
    c.put(f"{a}.{c.codes}", right)
    c.put(f"{b}.{c.codes}", left)


def norm_changed(c: Checkpoint, r: random.Random) -> None:
    name = r.choice(plain_names(c))
    tensor = c.get(name)
    flat = tensor.view(-1)
    flat[r.randrange(flat.numel())] += 0.5
    c.put(name, tensor)


def tokens_swapped(c: Checkpoint, r: random.Random) -> None:
    name = "model.embed_tokens.weight"
    tensor = c.get(name)
    i, j = r.sample(range(len(tensor)), 2)
    tensor[[i, j]] = tensor[[j, i]]
    c.put(name, tensor)


CONFIG_VALUES = {
    "rms_norm_eps": 0.1,
    "hidden_act": "gelu",
    "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"},
    "eos_token_id": 7,
    "max_position_embeddings": 64,
}


def config_value(c: Checkpoint, r: random.Random) -> None:
    key = r.choice(sorted(CONFIG_VALUES))
    c.json[CONFIG][key] = CONFIG_VALUES[key]
    c.changed.add(CONFIG)


def tokenizer_value(c: Checkpoint, r: random.Random) -> None:
    tokenizer = json.loads((c.folder / "tokenizer.json").read_text())
    if r.random() < 0.5:
        merges = tokenizer["model"]["merges"]
        merges.pop(r.randrange(len(merges)))
    else:
        vocabulary = tokenizer["model"]["vocab"]
        a, b = r.sample(sorted(vocabulary), 2)
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    c.raw["tokenizer.json"] = json.dumps(tokenizer).encode()


def template(c: Checkpoint, r: random.Random) -> None:
    text = (c.folder / "chat_template.jinja").read_text()
    c.raw["chat_template.jinja"] = text.replace(r.choice(["<|im_start|>", "<|im_end|>", "assistant"]), "").encode()


SILENT_KINDS: dict[str, Damage] = {
    "one code": Damage("W3", one_code),
    "one block scale": Damage("W3", one_block_scale),
    "nibbles swapped": Damage("W3", nibbles_swapped),
    "rows swapped": Damage("W3", rows_swapped),
    "layers swapped": Damage("W3", layers_swapped),
    "global scale of a group": Damage("W3", change_whole_group("global_scale", lambda t, r: t * r.choice([0.999, 1.001, 2.0]))),
    "input scale of a group": Damage(
        "W3", change_whole_group("input_scale", lambda t, r: t * r.choice([0.999, 1.001, 2.0])), inputs
    ),
    "unquantized value": Damage("W3", norm_changed),
    "tokens swapped": Damage("W3", tokens_swapped),
    "value of config.json": Damage("W3", config_value),
    "value of the tokenizer": Damage("W3", tokenizer_value),
    "chat template": Damage("W3", template),
}
