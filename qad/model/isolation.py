"""Whether documents packed into one row see each other, asked of a small random instance of the same architecture.

transformers keeps packed documents apart by their position ids, in attention alone: a recurrent state or a convolution goes on
from one document to the next, and some models ask for no mask. So each architecture is asked, as it is called in training:

    packed    hidden states of a document behind another one, against those of the document alone
    followed  hidden states of a document with other tokens behind it, against those of the document alone

The largest relative difference of the first was at most 7e-7 for attention alone and .04 to 1.2 for what leaks, in FP32 on a
CPU (34 families, transformers 5.24).
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import torch
from torch import Tensor, nn

from qad.model.built_config import quiet
from qad.model.loader import auto_class, code_is_trusted

LIMIT = 1e-4
_TOKENS = 24
_VOCABULARY = 256


def _by_name(sizes: dict[int, str]) -> dict[str, int]:
    return {name: size for size, names in sizes.items() for name in names.split()}


# Sizes that do not matter to the question, where a configuration has them.
_INNER = _by_name(
    {
        _VOCABULARY: "vocab_size",
        128: "intermediate_size intermediate_size_mlp shared_intermediate_size",
        64: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
        4: "num_experts num_local_experts n_routed_experts",
        2: "num_experts_per_tok eos_token_id",
        1: "n_group topk_group first_k_dense_replace bos_token_id",
        0: "pad_token_id",
    }
)
_WIDTHS = _by_name(
    {
        256: "mamba_d_ssm",
        128: "hidden_size",
        64: "q_lora_rank",
        32: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim mamba_d_head mamba_head_dim "
        "linear_key_head_dim linear_value_head_dim",
        16: "qk_rope_head_dim mamba_d_state ssm_state_size mamba_chunk_size chunk_size",
        8: "mamba_n_heads mamba_num_heads mamba_dt_rank",
        4: "num_attention_heads linear_num_value_heads",
        2: "num_key_value_heads mamba_expand linear_num_key_heads",
        1: "mamba_n_groups n_groups",
    }
)
_TOWER = _by_name(
    {
        128: "intermediate_size out_hidden_size",
        64: "hidden_size",
        32: "head_dim",
        2: "num_heads num_attention_heads num_key_value_heads",
        1: "num_hidden_layers depth",
    }
)
_PERIODS = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}


@dataclasses.dataclass(frozen=True)
class Isolation:
    """What a small instance did. It has to see what comes before, else it says nothing.

    packed: largest relative difference of a document behind another one; None where no instance could be run.
    followed: largest relative difference of a document with other tokens behind it; None likewise.
    unreached: `kind_of` the Linears that text never ran, but for the output head and experts, which are called together.
    why_not: why no instance could be run, one line; "" where one was.
    """

    packed: float | None
    followed: float | None
    unreached: frozenset[str] = frozenset()
    why_not: str = ""

    @property
    def proved(self) -> bool:
        """Documents in one row do not see each other."""
        return self.packed is not None and self.packed <= LIMIT

    @property
    def causal(self) -> bool:
        """No token sees a later one, so that padding behind a document changes nothing. True where nothing could be run, as
        every architecture tried is."""
        return self.followed is None or self.followed <= LIMIT


def kind_of(module: str) -> str:
    """`model.layers.7.mlp.up_proj` -> `model.layers.N.mlp.up_proj`."""
    return re.sub(r"\.\d+(?=\.|$)", ".N", module)


def probe(config: Any) -> Isolation:
    """config: of transformers. Takes a second or two; the state of random numbers is kept."""
    why = ""
    for widths in (_WIDTHS, {}):
        try:
            with torch.random.fork_rng(devices=[]), quiet():
                return _measured(_instance(_small(config, widths)))
        except Exception as error:  # transformers raises anything for sizes that do not fit together
            why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return Isolation(None, None, why_not=why)


def _small(config: Any, widths: dict[str, int]) -> Any:
    raw: dict[str, Any] = copy.deepcopy(config.to_dict())
    raw.pop("quantization_config", None)
    inner = config.get_text_config()
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    layers = int(inner.num_hidden_layers)
    kept = _kept(list(getattr(inner, "layers_block_type", None) or getattr(inner, "layer_types", None) or [0] * layers))
    for key, value in list(text.items()):
        if isinstance(value, list) and len(value) == layers:
            text[key] = [value[index] for index in kept]
        elif isinstance(value, list) and "layer" in key and all(isinstance(index, int) for index in value):
            text[key] = [kept.index(index) for index in value if index in kept]
    text["num_hidden_layers"] = len(kept)
    equal = text.get("num_key_value_heads") == text.get("num_attention_heads")
    sizes = {**_INNER, **_PERIODS, **widths}
    for key in (key for key in sizes if text.get(key)):
        text[key] = sizes[key]
    if equal and "num_key_value_heads" in text:
        text["num_key_value_heads"] = text["num_attention_heads"]
    if widths:
        _rotate(text, sees=text is not raw)
    for key in {"bos_token_id", "eos_token_id", "pad_token_id"} & {*raw}:
        raw[key] = _INNER[key]
    for key in (key for key in raw if key.endswith("_config") and key != "text_config" and isinstance(raw[key], dict)):
        raw[key] |= {name: size for name, size in _TOWER.items() if raw[key].get(name)}
    return type(config).from_dict(raw)


def _rotate(text: dict[str, Any], sees: bool) -> None:
    """What rotary embeddings take of a narrow head; of one that also sees, three parts."""
    if text.get("kv_lora_rank") and "head_dim" in text:
        text["head_dim"] = text.get("qk_rope_head_dim")  # latent attention rotates that part alone
    rope = text.get("rope_parameters") or {}
    if rope.get("mrope_section") or (sees and "rope_type" in rope):
        half = int((text.get("head_dim") or 32) * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _kept(kinds: list[Any]) -> list[int]:
    """The first layer of each kind, two at least, in order."""
    kept = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    return sorted({*kept.values(), *range(min(2, len(kinds)))} if len(kept) == 1 else kept.values())


def _instance(config: Any) -> Any:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = auto_class(config).from_config(config, trust_remote_code=code_is_trusted(), dtype=torch.float32)
    with torch.no_grad():  # as large as trained ones: what leaks is to be seen
        for parameter in (p for p in model.parameters() if p.dim() >= 2):
            parameter.mul_(4.0)
    return model.eval()


@torch.no_grad()
def _measured(model: Any) -> Isolation:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(3, _VOCABULARY, (2, 2, _TOKENS), generator=generator)
    reached: set[str] = set()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    hooks = [module.register_forward_pre_hook(_noting(reached, kind_of(name))) for name, module in linears.items()]
    alone = _hidden(model, second)
    for hook in hooks:
        hook.remove()
    packed = _hidden(model, first, second)[:, _TOKENS:]
    followed = _hidden(model, second, first)[:, :_TOKENS]
    continued = _hidden(model, torch.cat((first, second), 1))[:, _TOKENS:]
    if not torch.isfinite(alone).all() or _difference(continued, alone) <= LIMIT:
        raise ValueError("its hidden states are not finite, or do not depend on what comes before")
    head = model.get_output_embeddings()
    asked = {kind_of(name) for name, module in linears.items() if module is not head and ".experts." not in f".{name}."}
    return Isolation(_difference(packed, alone), _difference(followed, alone), frozenset(asked - reached))


def _noting(reached: set[str], kind: str) -> Any:
    def note(module: nn.Module, args: Any) -> None:
        reached.add(kind)

    return note


def _hidden(model: Any, *documents: Tensor) -> Tensor:
    """Documents [B, t] in one row each, called as the trainer calls the model -> [B, T, H]."""
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents]).expand(len(documents[0]), -1)
    hidden: Tensor = model.base_model(torch.cat(documents, 1), position_ids=positions, use_cache=False)[0]
    return hidden


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
