"""Kinds of damage to metadata and files: each a function (checkpoint, random) -> None, as in tensor_corruptions.py."""

from __future__ import annotations

import random

from damaged_checkpoint import CONFIG, INDEX, NESTED, REFUSED, Checkpoint, Damage, Kind, experts, index, tied, untied

from export.layouts.layout import MODELOPT

# --- metadata ---


def exclude(c: Checkpoint, names: list[str]) -> None:
    """In every place there is."""
    c.quantization["ignore"] = names
    if NESTED in c.json:
        c.json[NESTED]["quantization"]["exclude_modules"] = list(names)
        c.changed.add(NESTED)


def excluded_name_lost(c: Checkpoint, r: random.Random) -> None:
    listed = [n for n in c.quantization["ignore"] if n != "model.embed_tokens"]  # no Linear: not needed
    lost = r.choice(listed)
    exclude(c, [n for n in c.quantization["ignore"] if n != lost])


def excluded_in_one_place(c: Checkpoint, r: random.Random) -> None:
    lost = r.choice(c.quantization["ignore"])
    c.quantization["ignore"] = [name for name in c.quantization["ignore"] if name != lost]


def packed_name_excluded(c: Checkpoint, r: random.Random) -> None:
    exclude(c, [*c.quantization["ignore"], r.choice(c.modules)])


def pattern_excluded(c: Checkpoint, r: random.Random) -> None:
    module = r.choice(c.modules)
    if c.layout is MODELOPT:
        pattern = r.choice([f"*{module[5:]}", module[:-1] + "*", f"re:{module}", module.rpartition(".")[0]])
    else:
        pattern = r.choice([f"re:{module}", "re:.*" + module.rpartition(".")[2], "Linear"])
    exclude(c, [*c.quantization["ignore"], pattern])


def malformed_exclusion(c: Checkpoint, r: random.Random) -> None:
    exclude(c, [*c.quantization["ignore"], r.choice(["", ".", "lm_head.", ".lm_head"])])


def exclusion_of_another_type(c: Checkpoint, r: random.Random) -> None:
    c.quantization["ignore"] = r.choice(["lm_head", None, 3, {"lm_head": True}, [3], [None, "lm_head"]])


def outer_key_lost(c: Checkpoint, r: random.Random) -> None:
    keys = ["config_groups", "quant_method"]
    keys += ["quant_algo", "ignore"] if c.layout is MODELOPT else ["format", "quantization_status", "ignore"]
    c.quantization.pop(r.choice(keys))


def nested_key_lost(c: Checkpoint, r: random.Random) -> None:
    nested = c.json[NESTED]["quantization"]
    nested.pop(r.choice(sorted(nested)))
    c.changed.add(NESTED)


NESTED_VALUES = {
    "quant_algo": ["FP8", None],
    "kv_cache_quant_algo": ["FP2", 8],
    "group_size": [32, None, "16"],
    "exclude_modules": [[], None],
}


def nested_value(c: Checkpoint, r: random.Random) -> None:
    key = r.choice(sorted(NESTED_VALUES))
    c.json[NESTED]["quantization"][key] = r.choice(NESTED_VALUES[key])
    c.changed.add(NESTED)


def algorithm_contradicts_the_tensors(c: Checkpoint, r: random.Random) -> None:
    # W4A16 under the name NVFP4, without input_activations, is what other tools write: no contradiction.
    other = ["W4A16_NVFP4"] if c.quantization["quant_algo"] == "NVFP4" else []
    algorithm = r.choice([*other, "FP8", "MIXED_PRECISION"])
    c.quantization["quant_algo"] = algorithm
    c.json[NESTED]["quantization"]["quant_algo"] = algorithm
    c.changed.add(NESTED)


def activations_contradict_the_tensors(c: Checkpoint, r: random.Random) -> None:
    group = c.quantization["config_groups"]["group_0"]
    activations = None if group["input_activations"] else {**group["weights"], "dynamic": "local"}
    group["input_activations"] = activations


def method(c: Checkpoint, r: random.Random) -> None:
    other = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}[c.quantization["quant_method"]]
    c.quantization["quant_method"] = r.choice([other, "awq", "", None, 4])


def number_lost(c: Checkpoint, r: random.Random) -> None:
    group = c.quantization["config_groups"]["group_0"]
    numbers = group[r.choice(["weights", *(["input_activations"] if group.get("input_activations") else [])])]
    optional = [] if c.layout is MODELOPT else ["symmetric", "dynamic"] if numbers is group["weights"] else ["symmetric"]
    numbers.pop(r.choice([key for key in sorted(numbers) if key not in optional]))


def number_changed(c: Checkpoint, r: random.Random) -> None:
    group = c.quantization["config_groups"]["group_0"]
    numbers = group[r.choice(["weights", *(["input_activations"] if group.get("input_activations") else [])])]
    key = r.choice(sorted(numbers))
    other = {
        "num_bits": [8, "4", None],
        "type": ["int", None],
        "group_size": [32, 8, "16", None, True],
        "symmetric": [False],
        "strategy": ["group", "tensor", None],
        "dynamic": [True, "locale"],
    }
    numbers[key] = r.choice(other[key])


def number_unknown(c: Checkpoint, r: random.Random) -> None:
    group = c.quantization["config_groups"]["group_0"]
    r.choice([group, group["weights"]])[r.choice(["bits", "groupsize", "target"])] = 4


def targets(c: Checkpoint, r: random.Random) -> None:
    group = c.quantization["config_groups"]["group_0"]
    value = r.choice(["lost", [], None, "Linear", [4], ["Embedding"], ["re:.*q_proj"]])
    if value == "lost":
        group.pop("targets")
    else:
        group["targets"] = value


def groups(c: Checkpoint, r: random.Random) -> None:
    c.quantization["config_groups"] = r.choice([{}, [], None, [1], {"group_0": None}, "NVFP4"])


def weights_of_the_group(c: Checkpoint, r: random.Random) -> None:
    c.quantization["config_groups"]["group_0"]["weights"] = r.choice([None, [], "float", 4])


def format_or_status(c: Checkpoint, r: random.Random) -> None:
    key, values = r.choice(
        [
            ("format", ["pack-quantized", "dense", None, "mxfp4-pack-quantized"]),
            ("quantization_status", ["frozen", "initialized", None]),
        ]
    )
    c.quantization[key] = r.choice(values)


def nested_file_lost_or_added(c: Checkpoint, r: random.Random) -> None:
    if NESTED in c.json:
        c.raw[NESTED] = r.choice([None, b"{", b"[]", b"{}", b'{"quantization": []}'])
    else:
        c.raw[NESTED] = b'{"quantization": {"quant_algo": "NVFP4"}}'


def quantization_config_lost(c: Checkpoint, r: random.Random) -> None:
    c.json[CONFIG]["quantization_config"] = r.choice([None, "NVFP4", [], {}])
    c.changed.add(CONFIG)


# --- the model's own config ---


def size(key: str) -> Kind:
    """Twice what it was."""

    def kind(c: Checkpoint, r: random.Random) -> None:
        config = c.json[CONFIG]
        config[f"moe_{key}" if f"moe_{key}" in config else key] *= 2
        c.changed.add(CONFIG)

    return kind


def layers(c: Checkpoint, r: random.Random) -> None:
    c.json[CONFIG]["num_hidden_layers"] += r.choice([-1, 1])
    c.json[CONFIG].pop("layer_types", None)
    c.changed.add(CONFIG)


def tying(c: Checkpoint, r: random.Random) -> None:
    c.json[CONFIG]["tie_word_embeddings"] = not c.json[CONFIG]["tie_word_embeddings"]
    c.changed.add(CONFIG)


def router_not_excluded(c: Checkpoint, r: random.Random) -> None:
    listed = c.json[CONFIG]["quantization_config"]["ignore"]
    routers = [name for name in listed if name.endswith(".gate")]
    lost = r.choice(routers)
    exclude(c, [name for name in listed if name != lost])


# --- files ---


def weight_file(c: Checkpoint, r: random.Random) -> tuple[str, bytes]:
    name = r.choice(sorted(c.files))
    return name, (c.folder / name).read_bytes()


def truncated(c: Checkpoint, r: random.Random) -> None:
    name, data = weight_file(c, r)
    c.raw[name] = data[: r.randrange(len(data))]


def grown(c: Checkpoint, r: random.Random) -> None:
    name, data = weight_file(c, r)
    c.raw[name] = data + bytes(r.randrange(1, 100))


def header_damaged(c: Checkpoint, r: random.Random) -> None:
    name, data = weight_file(c, r)
    length = int.from_bytes(data[:8], "little")
    if r.random() < 0.5:
        c.raw[name] = (length + r.choice([-8, 1, 1 << 40])).to_bytes(8, "little") + data[8:]
    else:
        place = 8 + data[8 : 8 + length].index(b'"dtype"') + r.randrange(7)
        c.raw[name] = data[:place] + b"\x00" + data[place + 1 :]


def file_lost(c: Checkpoint, r: random.Random) -> None:
    c.raw[r.choice(sorted(c.files))] = None


def stale_file(c: Checkpoint, r: random.Random) -> None:
    _, data = weight_file(c, r)
    c.raw[f"model-0000{r.randrange(7, 10)}-of-00009.safetensors"] = data


def cut(*names: str) -> Kind:
    """A JSON file ends somewhere."""

    def kind(c: Checkpoint, r: random.Random) -> None:
        name = r.choice(names)
        data = (c.folder / name).read_bytes().rstrip()
        c.raw[name] = data[: r.randrange(len(data))]

    return kind


def index_entry(c: Checkpoint, r: random.Random) -> None:
    weight_map = c.json[INDEX]["weight_map"]
    name = r.choice(sorted(weight_map))
    what = r.choice(["lost", "elsewhere", "nowhere", "outside", "made up"])
    if what == "lost":
        weight_map.pop(name)
    elif what == "made up":
        weight_map[name + "x"] = weight_map[name]
    else:
        others = sorted({*weight_map.values()} - {weight_map[name]})
        weight_map[name] = {"elsewhere": r.choice(others), "nowhere": "model.safetensors", "outside": "../x"}[what]
    c.changed.add(INDEX)


def index_size(c: Checkpoint, r: random.Random) -> None:
    c.json[INDEX]["metadata"]["total_size"] += r.choice([-1, 1, 4096])
    c.changed.add(INDEX)


def index_lost(c: Checkpoint, r: random.Random) -> None:
    c.raw[INDEX] = r.choice([None, b"", b"[]", b'{"weight_map": []}', b'{"metadata": {}}'])


METADATA_KINDS: dict[str, Damage] = {
    "router not excluded": Damage("E7", router_not_excluded, experts),
    "excluded name lost": Damage("E7", excluded_name_lost),
    "excluded in one place only": Damage("E1", excluded_in_one_place, only="modelopt"),
    "packed module excluded": Damage("E7", packed_name_excluded),
    "packed module excluded by a pattern": Damage("E7", pattern_excluded),
    "malformed exclusion": Damage("E7", malformed_exclusion),
    "exclusion of another type": Damage("E1", exclusion_of_another_type),
    "key of quantization_config lost": Damage("E1", outer_key_lost),
    "key of hf_quant_config lost": Damage("E1", nested_key_lost, only="modelopt"),
    "value of hf_quant_config": Damage("E1", nested_value, only="modelopt"),
    "algorithm contradicts the tensors": Damage("E1", algorithm_contradicts_the_tensors, only="modelopt"),
    "activations contradict the tensors": Damage("E3", activations_contradict_the_tensors, only="compressed-tensors"),
    "quant_method": Damage("E1", method),
    "number of a config group lost": Damage("E1", number_lost),
    "number of a config group changed": Damage("E1", number_changed),
    "unknown key in a config group": Damage("E1", number_unknown, only="compressed-tensors"),
    "targets of a config group": Damage("E1", targets),
    "config groups": Damage("E1", groups),
    "weights of a config group": Damage("E1", weights_of_the_group),
    "format or status": Damage("E1", format_or_status, only="compressed-tensors"),
    "hf_quant_config.json lost, damaged or added": Damage("E1", nested_file_lost_or_added),
    "quantization_config lost": Damage("E1", quantization_config_lost),
    "hidden size": Damage("E3", size("hidden_size")),
    "intermediate size": Damage("E3", size("intermediate_size")),
    "vocabulary": Damage("E11", size("vocab_size")),
    "KV heads": Damage("E3", size("num_key_value_heads")),
    "number of layers": Damage("E11", layers),
    "a tied head untied": Damage("E11", tying, tied),
    "an untied head tied": Damage("E8", tying, untied),
    "weights truncated": Damage("E11", truncated),
    "weights grown": Damage("E11", grown),
    "header damaged": Damage("E11", header_damaged),
    "file lost": Damage("E11", file_lost),
    "stale file": Damage("E11", stale_file),
    "config.json cut": Damage(REFUSED, cut(CONFIG)),
    "hf_quant_config.json cut": Damage("E1", cut(NESTED), only="modelopt"),
    "index cut": Damage("E11", cut(INDEX), index),
    "tokenizer cut": Damage("E11", cut("tokenizer.json", "tokenizer_config.json")),
    "index entry": Damage("E11", index_entry, index),
    "total_size": Damage("E11", index_size, index),
    "index lost": Damage("E11", index_lost, index),
}
