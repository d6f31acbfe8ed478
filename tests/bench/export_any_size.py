"""`make bench`: a PTQ weight export of a model of any size: speed as a share of `cp`, peak memory, time of the check.

The source is synthetic: one shard of one layer with realistic weights, hard-linked once per layer, so that it takes a
layer's place on the disk. Layers then differ in nothing but their names, which a file of its own could not have: the names are
translated when a tensor is read, and nowhere else. W4A16_NVFP4, no forward pass.

`cp` is timed file by file, each with its fsync, before and after the export; both read a source that the page cache holds and
both are on disk when the clock stops. The export hashes what it reads, every link of the shard anew, and what it writes.

    python tests/bench/export_any_size.py --gigabytes 12
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import export.writer as writer
from export.check import check
from qad.arms.arm import DYNAMIC, KIND, Arm, write_arm
from qad.arms.selection import Selection
from qad.artifact import run_stage
from qad.model.source import Checkpoint, TensorInfo
from qad.training.stages import require_finite

HIDDEN, INTERMEDIATE, KV, VOCABULARY = 4096, 14336, 1024, 32768
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
NORMS = ("input_layernorm", "post_attention_layernorm")
LARGEST_GROUP = 2 * INTERMEDIATE * HIDDEN * 2


class Linked(Checkpoint):
    """Every layer is read from a link to the file of layer 0."""

    def get(self, name: str) -> torch.Tensor:
        stored = re.sub(r"layers\.\d+\.", "layers.0.", name)
        return Checkpoint(self.folder, self.config, {stored: self.tensors[name]}).get(stored)


def weights(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """BF16, standard deviation .02, one row in a hundred ten times as large."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 0.02
    weight[::100] *= 10
    return weight.bfloat16()


def build_source(folder: Path, gigabytes: float) -> Linked:
    layer = {f"model.layers.0.{m}.weight": weights(s, i) for i, (m, s) in enumerate(LINEARS.items())}
    layer |= {f"model.layers.0.{norm}.weight": torch.ones(HIDDEN).bfloat16() for norm in NORMS}
    outside = {"model.embed_tokens.weight": weights((VOCABULARY, HIDDEN), 9), "model.norm.weight": torch.ones(HIDDEN).bfloat16()}
    size = sum(weight.numel() * 2 for weight in layer.values())
    layers = max(1, round((gigabytes * 1e9 - VOCABULARY * HIDDEN * 2) / size))
    names = [f"model-{i:05d}.safetensors" for i in range(layers + 1)]
    save_file(outside, folder / names[0], metadata={"format": "pt"})
    save_file(layer, folder / names[1], metadata={"format": "pt"})
    for name in names[2:]:
        os.link(folder / names[1], folder / name)
    tensors = {name: TensorInfo(folder / names[0], "BF16", tuple(w.shape)) for name, w in outside.items()}
    for i, file in enumerate(names[1:]):
        for name, weight in layer.items():
            tensors[name.replace("layers.0.", f"layers.{i}.")] = TensorInfo(folder / file, "BF16", tuple(weight.shape))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    index = {"weight_map": {name: info.file.name for name, info in tensors.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text("{}")
    return Linked(folder, config, tensors)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def copy(source: Linked, scratch: Path) -> float:
    """Seconds of `cp` and fsync of every source file, each on disk before the next one takes its place."""
    taken = 0.0
    for file in sorted({info.file for info in source.tensors.values()}):
        target = scratch / "copy"
        taken += seconds(lambda file=file, target=target: _copy_to_disk(file, target))  # type: ignore[misc]
        target.unlink()
    return taken


def _copy_to_disk(file: Path, target: Path) -> None:
    subprocess.run(["cp", "--reflink=never", str(file), str(target)], check=True)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def measure(root: Path) -> dict[str, float]:
    """Of the source in ROOT/source: seconds of each step, peak memory before and after."""
    facts = json.loads((root / "source.json").read_text())
    tensors = {n: TensorInfo(Path(file), "BF16", tuple(shape)) for n, (file, shape) in facts["tensors"].items()}
    source = Linked(root / "source", facts["config"], tensors)
    modules = {
        f"model.layers.{i}.{module}": shape
        for i in range(facts["config"]["num_hidden_layers"])
        for module, shape in LINEARS.items()
    }
    selection = Selection("W4A16_NVFP4", modules, {"lm_head": "output head", "model.embed_tokens": "embedding"})
    out: dict[str, float] = {"import_bytes": peak()}
    out["finite"] = seconds(lambda: require_finite(source))
    out["digest"] = seconds(lambda: source.digest)
    arm = root / "arm"
    run_stage(KIND, arm, {}, {}, lambda folder: write_arm(folder, "ptq", source, selection, {}))
    writer.open_arm = lambda folder: Arm(folder, "ptq", source, selection, {}, {"scales": DYNAMIC})  # type: ignore[attr-defined]
    # An export opens its source anew and hashes it. This process has done so for the arm and remembers: that time counts.
    out["export"] = out["digest"] + seconds(lambda: writer.export_arm(arm, root / "out"))
    out["peak_bytes"] = peak()
    errors: list[Any] = []
    out["check"] = seconds(lambda: errors.extend(f for f in check(root / "out") if f.severity == "error"))
    assert not errors, errors[0]
    out["checked_peak_bytes"] = peak()
    return out


def peak() -> float:
    """Bytes, of this process alone: getrusage's would hold that of the process that started it."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024.0


def in_its_own_process(root: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--step", str(root)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def synthetic(gigabytes: float, root: Path) -> None:
    (root / "source").mkdir()
    source = build_source(root / "source", gigabytes)
    tensors = {name: (str(info.file), info.shape) for name, info in source.tensors.items()}
    (root / "source.json").write_text(json.dumps({"config": source.config, "tensors": tensors}))
    size = sum(info.file.stat().st_size for info in {i.file: i for i in source.tensors.values()}.values())
    copies = [copy(source, root)]
    found = in_its_own_process(root)
    copies.append(copy(source, root))
    written = sum(path.stat().st_size for path in (root / "out").iterdir())
    copied = sum(copies) / 2
    print(
        f"source of {size / 1e9:.1f} GB in {len({i.file for i in source.tensors.values()})} shards, W4A16_NVFP4, "
        f"{written / 1e9:.2f} GB written"
    )
    print(f"  cp           {copied:7.1f} s  before and after: {copies[0]:.1f}, {copies[1]:.1f}")
    print(f"  export       {found['export']:7.1f} s  of these {found['digest']:.1f} s hash the source")
    print(f"  NaN and Inf  {found['finite']:7.1f} s  when the arm is made")
    print(f"  check        {found['check']:7.1f} s  peak memory until then {found['checked_peak_bytes'] / 1e9:.2f} GB")
    print(
        f"  memory       {found['import_bytes'] / 1e9:7.2f} GB before the export, largest scale group "
        f"{LARGEST_GROUP / 1e9:.2f} GB"
    )
    speeds = {what: size / taken / 1e9 for what, taken in (("export", found["export"]), ("cp", copied))}
    print(
        f"export of {size / 1e9:.1f} GB at {speeds['export']:.2f} GB/s, {speeds['export'] / speeds['cp']:.2f} of cp's speed "
        f"({speeds['cp']:.2f} GB/s), {found['peak_bytes'] / 1e9:.2f} GB of peak memory, checked in "
        f"{found['check']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=12.0, help="size of the synthetic source (default: 12)")
    parser.add_argument("--work", type=Path, help="folder for what is written and removed again (default: TMPDIR)")
    parser.add_argument("--step", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(measure(args.step)))
        return
    with tempfile.TemporaryDirectory(prefix="export-bench-", dir=args.work) as root:
        synthetic(args.gigabytes, Path(root))


if __name__ == "__main__":
    main()
