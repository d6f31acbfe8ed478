"""What engines and transformers do with the modules of an architecture: one row each, asked by everything else.

Members of a scale group share one global scale and one input scale, because an engine runs them as one GEMM that has room
for one of each: TensorRT-LLM refuses unequal ones, vLLM takes the maximum and serves the others wrong. Source of `fused`:
`packed_modules_mapping` of vLLM's model classes (tests/engines/test_families.py holds every row against it).

A row is found by `model_type` of config.json; what no row lists has the default one, as most architectures do.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from qad.model.stacked import PLAIN, Layout, Stored

Fused = tuple[tuple[str, tuple[str, ...]], ...]
_QKV: Fused = (("qkv_proj", ("q_proj", "k_proj", "v_proj")),)
_FUSED: Fused = (
    *_QKV,
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("w13", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
)
_NEVER = {
    "lm_head": "output head",
    "embed_out": "output head",
    "gate": "router",
    "router": "router",
    "shared_expert_gate": "router",
}
_TOWERS = (
    "vision_tower",
    "visual",
    "vision_model",
    "vision_encoder",
    "vision_embed_tokens",
    "embed_vision",
    "multi_modal_projector",
    "connector",
    "audio_tower",
    "embed_audio",
    "mtp",
)
_ABSORBED = "engines send an identity through it to absorb it into attention, which quantized inputs would distort (MLA)"
_MAMBA1 = "inside a Mamba-1 mixer, which engines build unquantized"
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture, or several that are alike.

    model_types: of config.json, or of its text_config.
    fused: an engine's name of a fused module, and the last parts of its members' names, siblings of one parent.
    never: last part of a name -> why it is never quantized.
    weights_alone: last part of a name -> why its inputs are never quantized.
    towers: parts of names; what lies inside is no language model.
    mixer: last part of a name that only a Mamba-1 mixer has: all of the mixer stays unquantized.
    row_parallel: last parts of the names of Linears whose K tensor parallelism divides.
    head: name of the output head.
    embeddings: last parts of the names of token embeddings.
    layer_kind: of every layer where config.json lists no kinds; None: attention.
    state_heads: keys of config.json that count the heads of a recurrent state.
    stacked: tensors of checkpoints that hold all experts of a layer; the first form is what engines and transformers know.
    unserved: why no engine here serves its experts quantized.
    reordered: last parts of the names of Linears whose rows vLLM puts into another order when it loads them.
    """

    model_types: tuple[str, ...] = ()
    fused: Fused = _FUSED
    never: Mapping[str, str] = dataclasses.field(default_factory=lambda: _NEVER)
    weights_alone: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"kv_b_proj": _ABSORBED})
    towers: tuple[str, ...] = _TOWERS
    mixer: str = "x_proj"
    row_parallel: tuple[str, ...] = ("o_proj", "down_proj", "w2", "out_proj", "dense_4h_to_h")
    head: str = "lm_head"
    embeddings: tuple[str, ...] = ("embed_tokens", "wte", "embed_in", "word_embeddings")
    layer_kind: str | None = None
    state_heads: tuple[str, ...] = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    stacked: tuple[Stored, ...] = ()
    unserved: str = ""
    reordered: tuple[str, ...] = ()

    def whole(self, name: str) -> tuple[Stored, str, str] | None:
        """Of a tensor that holds all experts of a layer: its form, what names of single experts begin with, and transformers'
        name of the parameter."""
        return next(((form, *found) for form in self.stacked if (found := form.find(name))), None)

    def siblings_of(self, module: str) -> tuple[str, ...]:
        """Full names of all modules that would share a scale group with `module`, itself included, existing or not."""
        parent, _, leaf = module.rpartition(".")
        prefix = f"{parent}." if parent else ""
        return tuple(prefix + sibling for sibling in self._siblings(leaf))

    def fused_name(self, module: str, modules: Collection[str] | None = None) -> str:
        """What engines call the fused module that `module` becomes a part of, else its own name. modules: the model's own;
        where several fused modules have a member of this name, they tell which (None: the largest)."""
        parent, _, leaf = module.rpartition(".")
        prefix = f"{parent}." if parent else ""
        fitting = [
            (len(leaves), fused)
            for fused, leaves in self.fused
            if leaf in leaves and (modules is None or all(prefix + other in modules for other in leaves))
        ]
        fitting = fitting or [(len(leaves), fused) for fused, leaves in self.fused if leaf in leaves]
        return prefix + max(fitting)[1] if fitting else module

    def is_whole(self, group: Collection[str]) -> bool:
        """True where the members of a scale group are all that some fused module of an engine has."""
        leaves = {name.rpartition(".")[2] for name in group}
        return any(leaves == {*members} for _, members in self.fused)

    def scale_groups(self, modules: Iterable[str]) -> list[tuple[str, ...]]:
        """Partition module names into scale groups, in order of first appearance; most are groups of one.

        Siblings are members of one parent: `layers.0.self_attn.q_proj` pairs with `layers.0.self_attn.k_proj`.
        """
        groups: dict[tuple[str, str], list[str]] = {}
        for name in modules:
            groups.setdefault(self._key(name), []).append(name)
        return [tuple(members) for members in groups.values()]

    def input_scale_groups(self, modules: Iterable[str]) -> list[tuple[str, ...]]:
        """Partition module names into groups that share one input scale: a scale group, or the same projection (gate and up
        together) of all experts of a layer, as engines quantize the input of all experts at once."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name in modules:
            parent, leaf = self._key(name)
            groups.setdefault((experts_of(name) or parent, leaf), []).append(name)
        return [tuple(members) for members in groups.values()]

    def never_quantized(self, module: str) -> str | None:
        """Why a module of this name is never quantized, whatever the recipe says."""
        parts = module.split(".")
        if parts[-1] in self.never:
            return self.never[parts[-1]]
        if "router" in parts:
            return "router"
        tower = next((part for part in parts if part in self.towers), None)
        return f"inside {tower}" if tower else None

    def in_mamba1(self, modules: Iterable[str]) -> dict[str, str]:
        """Of a model's modules, those that lie in a Mamba-1 mixer, and why they are never quantized."""
        names = list(modules)
        mixers = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] == self.mixer}
        return {name: _MAMBA1 for name in names if name.rpartition(".")[0] in mixers}

    def is_row_parallel(self, module: str) -> bool:
        """True where tensor parallelism divides K instead of N."""
        return module.rpartition(".")[2] in self.row_parallel

    def _siblings(self, leaf: str) -> tuple[str, ...]:
        return max((leaves for _, leaves in self.fused if leaf in leaves), key=len, default=(leaf,))

    def _key(self, module: str) -> tuple[str, str]:
        parent, _, leaf = module.rpartition(".")
        return parent, self._siblings(leaf)[0]


def experts_of(name: str) -> str | None:
    """`model.layers.0.mlp.experts.7.up_proj` -> `model.layers.0.mlp.experts`; None outside of experts."""
    match = _EXPERT.match(name)
    return match[1] if match else None


_DELTA: Fused = (*_FUSED, ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")), ("in_proj_ba", ("in_proj_b", "in_proj_a")))
_INDEXED = "engines fuse it with a projection of another module, the indexer"

_GATE_UP, _BLOCKS = ("experts.gate_up_proj", "experts.down_proj"), ("experts.gate_up_proj_blocks", "experts.down_proj_blocks")

DEFAULT = Family()
ROWS = (
    # Gated delta rule with the four projections stored apart; vLLM makes two of them.
    Family(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "minicpmv4_6", "minicpmv4_7"), fused=_DELTA),
    Family(("falcon_h1",), layer_kind="hybrid"),
    Family(
        ("gpt_oss",),
        stacked=(
            Stored(_GATE_UP, "experts", Layout(biased=True, transposed=True, interleaved=True)),
            Stored(_BLOCKS, "experts", Layout(interleaved=True), mxfp4=True),
        ),
        unserved="vLLM 0.32 has no place for the biases of quantized experts, skips them silently and computes with unset ones",
    ),
    Family(
        ("llama4", "llama4_text"),
        stacked=(Stored(_GATE_UP, "experts", Layout(transposed=True)),),
        reordered=("q_proj", "k_proj"),  # for its rotary embedding
    ),
    Family(
        ("granitemoe", "granitemoeshared", "granitemoehybrid"),
        stacked=(
            Stored(
                ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
                "block_sparse_moe.experts",
                PLAIN,
            ),
        ),
    ),
    Family(("mamba2",), state_heads=(*DEFAULT.state_heads, "num_heads")),
    Family(("gpt_neox",), head="embed_out", row_parallel=(*DEFAULT.row_parallel, "dense")),
    # Linear attention with a gate beside q, k and v; its other attention has no gate.
    Family(("olmo_hybrid",), fused=(*_FUSED, ("in_proj_qkvg", ("q_proj", "k_proj", "v_proj", "g_proj")))),
    Family(("inkling_text", "inkling_mm_model"), fused=(*_FUSED, ("qkvr", ("wq_du", "wk_dv", "wv_dv", "wr_du")))),
    Family(("hy_v4",), fused=(*_FUSED, ("wk_weights_proj", ("wk", "weights_proj")))),
    Family(("deepseek_v4",), fused=(*_QKV, ("gate_up_proj", ("w1", "w3")), ("fused_wqa_wkv", ("wq_a", "wkv")))),
    Family(
        ("molmo2",),
        fused=(
            ("merged_qkv", ("wq", "wk", "wv")),
            ("merged_kv", ("k_proj", "v_proj")),
            ("merged_linear", ("gate_proj", "up_proj")),
        ),
    ),
    Family(
        ("qwen4_exp", "qwen4_exp_text"),
        never={**_NEVER, **dict.fromkeys(("q_proj", "k_proj", "v_proj"), _INDEXED)},
        fused=(
            *_DELTA,
            ("kv_proj", ("key_proj", "value_proj")),
            ("input_mix_weight_down_block_inject", ("input_mix_weight_down", "block_inject_weight", "_input_mix_padding")),
        ),
    ),
    Family(("exaone",), fused=(*_FUSED, ("gate_up_proj", ("c_fc_0", "c_fc_1"))), row_parallel=("out_proj", "c_proj")),
    Family(("phi",), row_parallel=("dense", "fc2")),
    Family(("gpt2", "gpt_bigcode", "starcoder2"), row_parallel=("o_proj", "c_proj")),
)
# Walked the whole way by `make families`: a row on docs/reference/families.md that is whole.
TRIED = frozenset(
    (
        "bamba",
        "deepseek_v3",
        "falcon_h1",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "llama",
        "llama4_text",
        "mistral",
        "mistral3",
        "mixtral",
        "nemotron_h",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen2_5_vl",
        "qwen3",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "smollm3",
        "smolvlm",
    )
)
_BY_TYPE = {name: row for row in ROWS for name in row.model_types}


def family_name(config: Any) -> str:
    """The model_type by which a config.json (a dictionary) or a transformers configuration finds its row: its own or that of its
    text_config; its own where no row lists either."""
    read = config.get if isinstance(config, Mapping) else functools.partial(_attribute, config)
    text: Any = read("text_config") or {}
    inner = text.get("model_type") if isinstance(text, Mapping) else _attribute(text, "model_type")
    own = str(read("model_type") or "")
    return str(inner) if own not in _BY_TYPE and inner in _BY_TYPE else own


def family_of(config: Any) -> Family:
    """The row of a configuration, the default one where no row lists it."""
    return named_family(family_name(config))


def named_family(name: str) -> Family:
    """The row of a `family_name`."""
    return _BY_TYPE.get(name, DEFAULT)


def _attribute(config: Any, key: str) -> Any:
    return getattr(config, key, None)
