"""`make bench`: the same model quantized and exported by us and by ModelOpt: seconds and peak memory, ratios of one run.

The same scope on both sides: from the BF16 folder on disk to the NVFP4 folder on disk, with max calibration on the same
random tokens where activations are quantized (NVFP4), without a forward pass where they are not (W4A16_NVFP4). BF16 compute.
Each side runs in a process of its own; imports are done before the clock starts and their memory is counted apart. The
packed bytes of the two folders must be equal. Ours also looks for NaN and Inf, hashes what it reads and writes, and is on disk
when the clock stops; ModelOpt's does none of these.

A small model is mostly loaded, not quantized: `--synthetic GB` measures a random Llama of that size as well.

    python tests/bench/export_against_modelopt.py models/SmolLM2-135M-Instruct --synthetic 2
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from safetensors import safe_open

CONFIGS = {"W4A16_NVFP4": "W4A16_NVFP4_CFG", "NVFP4": "NVFP4_DEFAULT_CFG"}
WINDOWS, SEQ_LEN = 2, 64


def random_llama(folder: Path, gigabytes: float, tokenizer: Path) -> Path:
    """A BF16 folder: layers of 0.11 GB each, as many as it takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=7168,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=8192,
        num_hidden_layers=max(1, round(gigabytes / 0.113)),
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


def tokens() -> torch.Tensor:
    """[WINDOWS, SEQ_LEN]"""
    return torch.randint(0, 512, (WINDOWS, SEQ_LEN), generator=torch.Generator().manual_seed(0))


def ours(model: Path, format: str, root: Path) -> tuple[float, float, float]:
    from transformers import AutoModelForCausalLM  # noqa: F401 (an import that ModelOpt's side has as well)

    from export.check import check
    from export.writer import export_arm
    from qad.arms.arm import write_arm
    from qad.arms.selection import select
    from qad.artifact import run_stage
    from qad.model.loader import load_skeleton
    from qad.model.source import open_checkpoint
    from qad.model.streamed import streamed_model
    from qad.text.windows import Windows
    from qad.training.calibrate import Calibration, calibrate
    from qad.training.stages import require_finite

    imported, started = peak(), time.perf_counter()
    source = open_checkpoint(model)
    selection = select(load_skeleton(source), format)
    require_finite(source)
    found = Calibration({}, {}, ())
    if selection.quantizes_activations:
        windows = Windows.of(tokens(), torch.arange(SEQ_LEN).expand(WINDOWS, SEQ_LEN).contiguous())
        found = calibrate(streamed_model(source, "bfloat16"), selection, windows)
    run_stage("arm", root / "arm", {}, {}, lambda f: write_arm(f, "ptq", source, selection, found.input_scales))
    export_arm(root / "arm", root / "ours")
    taken, highest = time.perf_counter() - started, peak()
    started = time.perf_counter()
    assert not [f for f in check(root / "ours") if f.severity == "error"]
    print(f"  check of ours {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return taken, highest, imported


def modelopt(model: Path, format: str, root: Path) -> tuple[float, float, float]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    imported, started = peak(), time.perf_counter()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    forward = None if format == "W4A16_NVFP4" else lambda m: m(tokens(), use_cache=False)
    with torch.no_grad():
        mtq.quantize(loaded, getattr(mtq, CONFIGS[format]), forward)
    export_hf_checkpoint(loaded, export_dir=root / "modelopt")
    return time.perf_counter() - started, peak(), imported


def peak() -> float:
    """Bytes, of this process alone."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024.0


def in_its_own_process(side: str, model: Path, format: str, root: Path) -> tuple[float, float, float]:
    command = [sys.executable, __file__, str(model), "--side", side, "--format", format, "--root", str(root)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds, highest, imported = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds, highest, imported


def packed_modules(ours: Path, theirs: Path) -> int:
    """How many, all of them with the same bytes in both folders."""
    with safe_open(ours / "model.safetensors", "pt") as a, safe_open(theirs / "model.safetensors", "pt") as b:
        names = [name for name in a.keys() if a.get_slice(name).get_dtype() == "U8"]  # noqa: SIM118 (not a dict)
        for name in names:
            assert torch.equal(a.get_tensor(name), b.get_tensor(name)), name
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--synthetic", type=float, metavar="GB", help="measure a random Llama of this size as well")
    parser.add_argument("--formats", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    for hidden in ("--side", "--format", "--root"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        warnings.simplefilter("ignore")
        print(json.dumps({"ours": ours, "modelopt": modelopt}[args.side](args.model, args.format, Path(args.root))))
        return
    for format in args.formats:
        compare(args.model, format)
    if args.synthetic:
        with tempfile.TemporaryDirectory() as folder:
            model = random_llama(Path(folder) / f"random-llama-{args.synthetic:g}-gb", args.synthetic, args.model)
            for format in args.formats:
                compare(model, format)


def compare(model: Path, format: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        taken = {side: in_its_own_process(side, model, format, root) for side in ("modelopt", "ours")}
        packed = packed_modules(root / "ours", root / "modelopt")
    (our_time, our_peak, our_start), (their_time, their_peak, their_start) = taken["ours"], taken["modelopt"]
    print(f"export of {model.name}, {format}, {packed} packed modules, equal codes")
    print(f"  ours {our_time:.1f} s, ModelOpt {their_time:.1f} s: {their_time / our_time:.1f} times as fast")
    own, their_own = our_peak - our_start, their_peak - their_start
    print(
        f"  memory above imports: ours {own / 1e9:.2f} GB, ModelOpt {their_own / 1e9:.2f} GB: {own / their_own:.2f} of its "
        f"(in all {our_peak / 1e9:.2f} and {their_peak / 1e9:.2f} GB)",
        flush=True,
    )


if __name__ == "__main__":
    main()
