"""`make gpu-check`: what only a GPU can show, in one script that brings its own text and models. On a CPU the same, smaller.

    python tests/bench/gpu_check --part bits      bits against the CPU's, bandwidth of fake quantization against a copy
    python tests/bench/gpu_check --part train     a few hundred steps of QAD, recovery, cost of a step
    python tests/bench/gpu_check --part scale     steps of large models: time and peak memory by phase against the plan

A table on standard output; every number in OUT/gpu_check-PART.json, OUT being --out or the environment's. Exit 1 where one bit
differs, 0 else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).parents[3]))  # the checkout: nothing needs to be installed

import device_bits
import torch
from device_speed import Speed, measure_speed


def environment(device: str) -> dict[str, Any]:
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "device": device,
        "name": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version,
    }


def bits(device: str, compile_too: bool) -> tuple[dict[str, Any], list[str], bool]:
    """Numbers, table, and whether every bit is the same."""
    gpu = device == "cuda"
    modes = device_bits.modes_of(device, compile_too)
    verdicts = device_bits.check(device, *((256, 1024) if gpu else (24, 96)), modes)
    rows = measure_speed(device, 8192 if gpu else 1024, compile_too, 20 if gpu else 5)
    lines = [f"{'bits against the CPU, eager':<34}{'dtype':<10}{'mode':<10}{'cases':>6}{'values':>14}{'different':>12}"]
    for v in verdicts:
        lines.append(f"{v.operation:<34}{v.dtype:<10}{v.mode:<10}{v.cases:>6}{v.values:>14,}{v.different:>12,}")
        lines += [f"    first: {v.first}"] if v.different else []
    lines += ["", *speed_table(rows)]
    numbers = {"bits": [dataclasses.asdict(v) for v in verdicts], "speed": [dataclasses.asdict(r) for r in rows]}
    return numbers, lines, not any(v.different for v in verdicts)


def speed_table(rows: list[Speed]) -> list[str]:
    lines = [f"{'operation':<40}{'dtype':<10}{'ms':>10}{'GB/s':>10}{'of a copy':>12}"]
    for r in rows:
        lines.append(f"{r.operation:<40}{r.dtype:<10}{r.milliseconds:>10.3f}{r.gigabytes_per_s:>10.2f}{r.of_copy:>11.2f}x")
    return lines


def train(device: str, compile_too: bool) -> tuple[dict[str, Any], list[str], bool]:
    from device_training import CPU, GPU, measure_training

    if not compile_too:
        os.environ["QAD_COMPILE"] = "0"
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        found = measure_training(GPU if device == "cuda" else CPU, Path(folder), device, lambda line: print(line, flush=True))
    step, same = found["step"], found["exported_and_reloaded_equal"]
    lines = [
        f"original: Llama of {found['parameters'] / 1e6:.1f} M parameters, cross-entropy {found['teacher_cross_entropy']:.3f}, "
        f"trained in {found['teacher_seconds']:.0f} s",
        f"QAD: {found['steps']} steps, {found['tokens']:,} tokens in {found['dtype']}",
        f"{'learning rate':>15}{'KL of PTQ':>12}{'of QAD':>12}{'of PTQ':>10}{'step':>7}{'tokens/s':>12}{'seconds':>9}",
        *(
            f"{q['rate']:>15g}{q['kl_ptq']:>12.3g}{q['kl_qad']:>12.3g}{q['kl_qad'] / q['kl_ptq']:>10.1%}{q['best_step']:>7}"
            f"{q['tokens_per_s']:>12,.0f}{q['seconds']:>9.0f}"
            for q in found["qad"]
        ),
        f"student and reloaded export: logits {'equal to the bit' if same else 'DIFFER'}",
        f"step of {step['tokens']:,} tokens, {step['parameters'] / 1e6:.1f} M parameters: QAD / plain distillation "
        f"{step['ratio']:.2f}x ({min(step['ratios']):.2f}-{max(step['ratios']):.2f}, {len(step['ratios'])} pairs)",
    ]
    return {"training": found}, lines, same


def scale(device: str, compile_too: bool) -> tuple[dict[str, Any], list[str], bool]:
    from device_scale import CPU, GPU, measure_scale, scale_table

    if not compile_too:
        os.environ["QAD_COMPILE"] = "0"
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        found = measure_scale(GPU if device == "cuda" else CPU, Path(folder), device, lambda line: print(line, flush=True))
    return {"scale": found}, scale_table(found), True


PARTS = {"bits": bits, "train": train, "scale": scale}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--eager", action="store_true", help="compile nothing: for machines without a compiler")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu-check")), help="folder of the JSON files"
    )
    args = parser.parse_args(arguments)
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    where = environment(device)
    print(", ".join(f"{key} {value}" for key, value in where.items()), flush=True)
    right = True
    for name in PARTS if args.part == "all" else (args.part,):
        started = time.monotonic()
        numbers, lines, same = PARTS[name](device, not args.eager)
        seconds = time.monotonic() - started
        document = {"part": name, "environment": where, "same_bits": same, "seconds": seconds, **numbers}
        aside = args.out / f"gpu_check-{name}.json.partial"
        aside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        aside.replace(aside.with_suffix(""))
        verdict = "measured" if name == "scale" else "every bit the same" if same else "BITS DIFFER"
        print("\n".join([*lines, f"{name}: {verdict}, {seconds:.0f} s", ""]), flush=True)
        right = right and same
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
