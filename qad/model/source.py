"""The BF16 model a run starts from: a Hugging Face folder with safetensors, opened by its headers. Experts stored in MXFP4, as
gpt-oss is published, are decoded when they are read.

Nothing is written to the source and no tensor is read before it is asked for. A hub name is resolved to its
local snapshot first. Everything that cannot work is refused here, before hours are spent.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from os.path import isdir, isfile  # Path's raise OSError for a name that no file system takes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qad.artifact import digest_of, sha256_file
from qad.errors import SourceError
from qad.model.beside import WEIGHTS
from qad.model.built_config import embedding_name, ties_embeddings
from qad.model.families import Family, family_of
from qad.model.tensors import TensorInfo, expert_by_expert
from qad.untrusted import clean, json_with_faults, names, regular_bytes
from qad.untrusted.safetensors_header import read_header
from qad.untrusted.yaml_text import strict_yaml

# Of a hub repository: everything but weights in other forms, which lie in folders or have other names.
_NOT_DOWNLOADED = [
    *(f"*{suffix}" for suffix in WEIGHTS if suffix != ".safetensors"),
    "*.bin.index.json",
    "original/*",
    "onnx/*",
    "consolidated*.safetensors",
    "*/*.safetensors",
]
DEMO_FOLDER = "models/SmolLM2-135M-Instruct"  # where the shipped recipe looks for the demo's model
_SCALES = ("weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "activation_scale")
_LONGEST_NAME = 200  # characters of the name people call a model by
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them makes a tokenizer
# What else decides how text becomes ids, and chats text.
_PROMPT_FILES = (
    *(
        "tokenizer_config.json",
        "generation_config.json",
        "merges.txt",
        "vocab.txt",
        "spiece.model",
        "*.tiktoken",
        "tiktoken.model",
    ),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    "additional_chat_templates/*.jinja",
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model folder: config.json, tensors by name in a stable order, and the name people call it by.

    Experts are named one by one, also where the files hold those of a layer in one tensor (qad.model.stacked).
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, name: str) -> Tensor:
        """One tensor, memory-mapped, in its stored dtype; what is stored in MXFP4, decoded to BF16."""
        return self.tensors[name].read(name)

    @functools.cached_property
    def wholes(self) -> dict[str, tuple[str, ...]]:
        """Tensors of all experts of a layer, by the name that transformers knows -> those of single experts, in order."""
        found: dict[str, list[str]] = {}
        for name, info in self.tensors.items():
            if info.part is not None:
                found.setdefault(info.part.whole, []).append(name)
        return {name: tuple(parts) for name, parts in found.items()}

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of `wholes`."""
        infos = [self.tensors[part] for part in self.wholes[name]]
        last = infos[-1].part
        assert last is not None
        count = last.expert + 1
        rows = (sum(info.shape[0] for info in infos) // count, *infos[0].shape[1:])
        turned = self.family.stacked[0].layout.transposed and len(rows) == 2
        return count, *(rows[::-1] if turned else rows)

    def whole(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """One of `wholes`, BF16, made of what `read` says of each expert's projections."""
        parts = self.wholes[name]
        first = self.tensors[parts[0]].part
        assert first is not None
        made = torch.empty(self.whole_shape(name), dtype=torch.bfloat16)
        views = (view for one in made for view in self.family.stacked[0].layout.parts(first.parameter, one))
        for part, view in zip(parts, views, strict=True):
            view.copy_(read(part))
        return made

    @functools.cached_property
    def digest(self) -> str:
        """Identity of config, weights and tokenizer by content."""
        beside = {f for name in ("config.json", *_TOKENIZERS, *_PROMPT_FILES) for f in self.folder.glob(name)}
        found = sorted(f for f in beside | {info.file for info in self.tensors.values()} if f.is_file())
        with ThreadPoolExecutor() as pool:  # neither reading nor hashing holds the interpreter
            return digest_of({f.name: digest for f, digest in zip(found, pool.map(_hash, found), strict=True)})

    @property
    def card(self) -> dict[str, Any]:
        """Front matter of the folder's README.md (model_name, base_model, license ...), empty where there is none."""
        try:
            text = regular_bytes(self.folder / "README.md").decode("utf-8", errors="replace")
            match = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
            front = strict_yaml(match[1]) if match else None
        except (OSError, ValueError):
            return {}
        return front if isinstance(front, dict) else {}

    @property
    def display_name(self) -> str:
        """The card's model_name, else the folder's name, as one visible line."""
        name = self.card.get("model_name")
        return clean(name if name else _snapshot_name(self.folder), _LONGEST_NAME)

    @property
    def tied_embeddings(self) -> bool:
        """Head and embedding are one weight; a head that is stored all the same is not used."""
        return ties_embeddings(self.config)

    @property
    def embedding(self) -> str | None:
        """Name of the embedding's weight, None where it has none of the usual ones."""
        ends = tuple(f"{leaf}.weight" for leaf in self.family.embeddings)
        return next((name for name in self.tensors if name.endswith(ends)), None)

    @property
    def family(self) -> Family:
        """What engines do with the modules of the architecture."""
        return family_of(self.config)

    @property
    def head(self) -> str:
        """Name of the output head's weight, where it has one of its own."""
        return f"{self.family.head}.weight"


def open_checkpoint(model: str | Path, *, allow_quantized: bool = False) -> Checkpoint:
    """Open a local folder or a hub name. Raises SourceError with the remedy for anything that is not a whole BF16,
    FP16 or FP32 causal language model in safetensors with its tokenizer."""
    folder = _resolve(str(model))
    config = _config(folder)
    tensors = expert_by_expert(family_of(config), _tensors(folder))
    if any(info.part is not None and info.part.scales is not None for info in tensors.values()):
        config.pop("quantization_config", None)  # decoded wherever it is read
    if not allow_quantized and config.get("quantization_config"):
        block = config["quantization_config"]
        method = block.get("quant_method", "unknown") if isinstance(block, dict) else "unknown"
        raise SourceError(f"{folder} is already quantized ({method}): start from the BF16 original it was made from")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise SourceError(f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}): copy the model's own there")
    if not allow_quantized:
        odd = next(((n, t.dtype) for n, t in tensors.items() if t.dtype not in ("BF16", "F16", "F32", "I64")), None)
        if odd:
            raise SourceError(f"{folder}: tensor {clean(odd[0])} is {odd[1]}, expected BF16, F16 or F32: start from the original")
    checkpoint = _with_embedding(Checkpoint(folder, config, tensors))
    if not allow_quantized:
        _require_applied_scales(checkpoint)
        _require_one_head(checkpoint)
    return checkpoint


def _with_embedding(checkpoint: Checkpoint) -> Checkpoint:
    """Of a tied head and embedding a file may hold either (safetensors' `save_model` does): what is there is the embedding."""
    if checkpoint.embedding is not None or checkpoint.head not in checkpoint.tensors or not checkpoint.tied_embeddings:
        return checkpoint
    name = embedding_name(checkpoint.config, [info.shape for info in checkpoint.tensors.values()])
    if name is None:
        return checkpoint
    tensors = {
        name if stored == checkpoint.head else stored: dataclasses.replace(info, stored=stored)
        if stored == checkpoint.head
        else info
        for stored, info in checkpoint.tensors.items()
    }
    return dataclasses.replace(checkpoint, tensors=tensors)


def _require_applied_scales(checkpoint: Checkpoint) -> None:
    """A checkpoint that was decoded from FP8 and kept its block scales: nobody knows whether they were applied."""
    left = next((name for name in checkpoint.tensors if name.endswith(_SCALES)), None)
    if left is not None:
        raise SourceError(
            f"{checkpoint.folder} holds {left}, a scale beside unquantized weights: nothing tells whether it was applied. Decode "
            "the original again, or remove the scales where you know that they were"
        )


def _require_one_head(checkpoint: Checkpoint) -> None:
    """transformers silently unties a stored head that differs from the embedding; then nobody knows what is meant."""
    embedding = checkpoint.embedding
    if not checkpoint.tied_embeddings or checkpoint.head not in checkpoint.tensors or embedding is None:
        return
    if not torch.equal(checkpoint.get(checkpoint.head), checkpoint.get(embedding)):
        raise SourceError(
            f"{checkpoint.folder}: head and embedding are tied, but {checkpoint.head} differs from {embedding} (config.json says "
            f"so, or leaves it to its class, which does): set tie_word_embeddings to false, or remove {checkpoint.head}"
        )


def _resolve(model: str) -> Path:
    path = Path(model).expanduser()
    if isdir(path):
        return path.resolve()
    if isfile(path):
        raise SourceError(f"model {model} is a file: give the folder that holds config.json and *.safetensors")
    if path == Path(DEMO_FOLDER):
        raise SourceError(
            f"model folder {model} does not exist yet: `make demo` makes it, as does python -m qad.command.demo_model {model}"
        )
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.count("/") != 1 or model.startswith("."):
        raise SourceError(f"model folder {model} does not exist: check the path (a hub name has the form owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, ignore_patterns=_NOT_DOWNLOADED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(
            f"model {model} is neither a local folder nor could it be fetched from the hub ({reason}): "
            "check the name, log in with `hf auth login`, or give a local folder"
        ) from error


def _config(folder: Path) -> dict[str, Any]:
    if (folder / "adapter_config.json").is_file():
        raise SourceError(f"{folder} is an adapter, not a model: merge it first (peft `merge_and_unload`)")
    path = folder / "config.json"
    if not path.is_file():
        if any(folder.glob("*.gguf")):
            raise SourceError(f"{folder} holds GGUF only: convert it with transformers (GgufConfig(dequantize=True))")
        raise SourceError(f"{folder} has no config.json: give a Hugging Face model folder")
    config = _json(path)
    if not isinstance(config, dict):
        raise SourceError(f"{path} is not a JSON object: fetch the file again")
    architectures = names(config.get("architectures"))
    if not any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in architectures):
        raise SourceError(
            f"{folder} is not a causal language model (architectures {clean(architectures or 'missing')}): "
            "QAD distils next-token distributions"
        )
    return config


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        return _indexed(folder, index_path)
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        hint = f" It holds {pickles[0]}: save it with save_pretrained first; pickle is not read." if pickles else ""
        if any(folder.glob("*.gguf")):
            hint = " It holds GGUF: convert it with transformers (GgufConfig(dequantize=True))."
        raise SourceError(f"{folder} has no *.safetensors weights.{hint or ' Is the download complete?'}")
    if len(files) > 1:
        raise SourceError(f"{folder} has {len(files)} safetensors files but no {index_path.name}: fetch the index too")
    return _header(files[0])


def _indexed(folder: Path, index_path: Path) -> dict[str, TensorInfo]:
    try:
        weight_map = dict(_json(index_path)["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{index_path} is not a safetensors index ({error}): fetch the file again") from error
    odd = [shard for shard in weight_map.values() if not isinstance(shard, str)]
    if odd:
        raise SourceError(f"{index_path} names {clean(repr(odd[0]))} as a file: fetch the file again")
    headers: dict[str, dict[str, TensorInfo]] = {}
    present = {path.name for path in folder.iterdir()}  # asking for a name that is too long would be an error of its own
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise SourceError(f"{index_path} points outside its folder ({clean(shard)}): the checkpoint is not trustworthy")
        if shard not in present or not (folder / shard).is_file():
            raise SourceError(f"{folder} lacks {clean(shard)}, which its index lists: the download is incomplete, resume it")
        headers[shard] = _header(folder / shard)
    _require_agreement(index_path, weight_map, headers)
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _require_agreement(index_path: Path, weight_map: dict[str, str], headers: dict[str, dict[str, TensorInfo]]) -> None:
    """Index and shards hold the same, each tensor once; what is read then does not depend on the reader."""
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise SourceError(
                f"{index_path} says {clean(name)} is in {clean(shard)}, but it is not: fetch index and shards again"
            )
    for shard, header in headers.items():
        for name in header:
            if weight_map.get(name) != shard:
                listed = f"lists it in {clean(weight_map[name])}" if name in weight_map else "does not list it"
                raise SourceError(f"{clean(shard)} holds {clean(name)}, but {index_path} {listed}: fetch index and shards again")
    single = index_path.with_name("model.safetensors")
    if single.name not in headers and single.is_file():
        raise SourceError(
            f"{single} lies beside an index that does not list it, and transformers would read it instead: remove the one "
            "that is stale"
        )


def _json(path: Path) -> Any:
    """A JSON file that every reader takes for the same. Raises SourceError."""
    try:
        value, faults = json_with_faults(regular_bytes(path))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} is not JSON ({error}): fetch the file again") from error
    if faults:
        raise SourceError(f"{path}: {faults[0]}, and which value counts depends on the reader: fetch the file again")
    return value


def _header(path: Path) -> dict[str, TensorInfo]:
    try:
        return {name: TensorInfo(path, entry.dtype, entry.shape) for name, entry in read_header(path).tensors.items()}
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read ({error}): the download is incomplete or damaged") from error


def _hash(path: Path) -> str:
    """A hub cache names its blobs by their sha256; elsewhere the bytes are read."""
    blob = path.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", blob):
        return blob
    stat = path.stat()
    return _hash_once(path, stat.st_size, stat.st_mtime_ns)


@functools.cache
def _hash_once(path: Path, size: int, modified: int) -> str:
    """Several arms of one run open the same source: its bytes are read once while size and modification time stay."""
    return sha256_file(path)


def _snapshot_name(folder: Path) -> str:
    """`models--owner--name/snapshots/REVISION` of the hub cache -> owner/name; else the folder's own name."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name
