"""`make bench-recovery`: how much NVFP4 (W4A4, all Linears but lm_head) loses, made by us, by ModelOpt and by llm-compressor.

All sides quantize one BF16 folder with one calibration text, and train on the same windows in the same order; every exported
folder is measured by `qad.validate` on one test text: KL to the BF16 original with intervals over documents, and the paired
difference of ours and theirs. Ours is studies/wikitext.yaml with other texts and tokens.

    python tests/bench/recovery --calibration a.txt --train b.txt --test c.txt --out runs/recovery \\
        [--llm-compressor VENV/bin/python] [--tokens 12800 51200] [--only GLOB ...]

Each maker runs in a process of its own, one after another, with as many threads as OMP_NUM_THREADS says, from the folder on
disk to the exported folder on disk: wall and CPU seconds and peak memory. What is there already is not made again; --only makes
some of it. OUT/result.json and OUT/result.md hold what was found so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import qad
from harness.records.record import FidelityData, FidelitySequence, read
from harness.statistics.intervals import Floats, cluster_index
from harness.statistics.resampling import ratio_of_sums

HERE = Path(__file__).parent
STUDY = HERE.parents[2] / "studies" / "wikitext.yaml"
SEQ_LEN, TEST_TOKENS = 256, 6144
TRAIN = ("train.validation_data=python-docs", "train.save_every=1000")  # the study's own validation text is not at hand here
LIKE_OURS = ("--lr", "1e-4", "--schedule", "linear")


@dataclasses.dataclass(frozen=True)
class Step:
    """name: of what is made and of its measurements. command: run in a process of its own. folders: arm -> exported folder.
    start: a folder of ours that it goes on in, and the copy to work in."""

    name: str
    command: list[str]
    folders: dict[str, Path]
    start: tuple[Path, Path] | None = None


def steps_of(args: argparse.Namespace) -> list[Step]:
    """In an order in which each finds what it needs: the windows of the others are those of our first run."""
    out: Path = args.out
    peer = [sys.executable, str(HERE / "with_modelopt.py"), str(args.model)]
    steps = [_ours(args, "ours-gptq", ["train=null", "quantize.balance=false"], {"ours-gptq": "ptq"})]
    for number, tokens in enumerate(args.tokens):
        arms = {"ours-plain": "ptq_plain", "ours-ptq": "ptq"} if number == 0 else {}
        name = f"ours-qad-{tokens}"
        step = _ours(args, name, ["quantize.plain=true", f"train.tokens={tokens}"], {**arms, name: "qad"})
        if number:  # the PTQ arms are those of the first
            start = out / f"ours-qad-{args.tokens[0]}", out / name
            step = dataclasses.replace(step, command=[*step.command, "--redo"], start=start)
        steps.append(step)
    for tokens in (0, *args.tokens):
        windows = out / f"ours-qad-{tokens or args.tokens[0]}" / "text" / "windows"
        for rate, settings in {"": (), "-1e-4": LIKE_OURS}.items():
            name = f"modelopt-qad{rate}-{tokens}" if tokens else "modelopt-ptq"
            if tokens or not rate:
                command = [*peer, str(windows), str(out / name), "--tokens", str(tokens), *settings]
                steps.append(Step(name, command, {name: out / name}))
    if args.llm_compressor:
        ids = out / f"ours-qad-{args.tokens[0]}" / "text" / "windows" / "calibration" / "ids.int32"
        theirs = [args.llm_compressor, str(HERE / "with_llm_compressor.py"), str(args.model), str(ids), str(SEQ_LEN)]
        for method in ("rtn", "gptq"):
            name = f"llm-compressor-{method}"
            steps.append(Step(name, [*theirs, str(out / name), "--method", method], {name: out / name}))
    return steps


def _ours(args: argparse.Namespace, name: str, changes: list[str], arms: dict[str, str]) -> Step:
    folder = args.out / name
    changes = [
        f"model={args.model}",
        f"seed={args.seed}",
        f"calibrate.data.path={args.calibration}",
        *([] if "train=null" in changes else [f"train.data.path={args.train}", *TRAIN]),
        "measure.fidelity=null",
        *changes,
    ]
    command = [sys.executable, "-m", "qad", "run", str(STUDY), "--out", str(folder)]
    command += [part for change in changes for part in ("--set", change)]
    return Step(name, command, {arm: folder / "export" / exported for arm, exported in arms.items()})


def make(step: Step, out: Path) -> None:
    """Run it, unless it was. Its log and OUT/made/NAME.json stay. Raises CalledProcessError."""
    noted = out / "made" / f"{step.name}.json"
    if noted.exists():
        return
    noted.parent.mkdir(parents=True, exist_ok=True)
    for folder in {folder for folder in step.folders.values() if folder.parent == out}:
        shutil.rmtree(folder, ignore_errors=True)
    if step.start and not step.start[1].exists():
        shutil.copytree(*step.start)
    print(f"== {step.name}", flush=True)
    started = time.perf_counter()
    with noted.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(step.command, stdout=log, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise subprocess.CalledProcessError(code, step.command, f"see {log.name}")
    found = {
        "wall_seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 2),
        "load": round(os.getloadavg()[1], 1),
    }
    noted.write_text(json.dumps(found) + "\n")


def measure(args: argparse.Namespace, folders: dict[str, Path]) -> dict[str, Any]:
    """KL per token and top-1 agreement of each folder, and each beside each of the others', as [value, low, high] of 95 %."""
    place = args.out / "validated"
    shutil.rmtree(place, ignore_errors=True)
    text: dict[str, Any] = {
        "data": {"source": "text", "path": str(args.test), "split": "all"},
        "tokens": TEST_TOKENS,
        "seq_len": SEQ_LEN,
    }
    qad.validate({"bf16": args.model, **folders}, place, measure={"memory": False, "fidelity": text}, seed=args.seed)
    data = {arm: _sequences(place / "measure" / arm / "fidelity.json") for arm in folders}
    kl, agree = ({arm: _column(found, name) for arm, found in data.items()} for name in ("kl_sum", "top1_agree"))
    sequences = next(iter(data.values()))
    tokens, cluster = _column(sequences, "tokens"), cluster_index([s.cluster for s in sequences])

    def triple(top: Floats, bottom: Floats, log: bool) -> list[float | None]:
        found = ratio_of_sums(top, bottom, cluster, log=log)
        return [None if value is None else round(value, 5) for value in (found.value, found.low, found.high)]

    others = [arm for arm in folders if not arm.startswith("ours")]
    pairs = [(arm, other) for other in others for arm in folders if arm != other]
    return {
        "documents": len(set(cluster.tolist())),
        "tokens": int(tokens.sum()),
        "kl": {arm: triple(kl[arm], tokens, True) for arm in folders},
        "top1": {arm: triple(agree[arm], tokens, False) for arm in folders},
        "kl_difference": {f"{a} - {b}": triple(kl[a] - kl[b], tokens, False) for a, b in pairs},
        "kl_ratio": {f"{a} / {b}": triple(kl[a], kl[b], True) for a, b in pairs},
    }


def _sequences(path: Path) -> list[FidelitySequence]:
    found = read(path).data
    assert isinstance(found, FidelityData)
    return found.sequences


def _column(sequences: list[FidelitySequence], name: str) -> Floats:
    return np.array([getattr(s, name) for s in sequences], dtype=np.float64)


def page(found: dict[str, Any], made: dict[str, dict[str, float]], tokens: list[int]) -> str:
    """Markdown: a row an arm, and of ours beside theirs what the paired interval says."""
    lines = ["| | KL to BF16 | top-1 | of ModelOpt PTQ's KL | wall s | CPU s | peak GB |", "|---|---|---|---|---|---|---|"]
    for arm, (kl, low, high) in found["kl"].items():
        ratio = found["kl_ratio"].get(f"{arm} / modelopt-ptq")
        shown = "" if ratio is None else "{:.3f} ({:.3f}-{:.3f})".format(*ratio)
        used = made.get(arm, {})
        cost = " | ".join(str(used.get(key, "")) for key in ("wall_seconds", "cpu_seconds", "peak_gb"))
        lines.append(f"| {arm} | {kl:.4f} ({low:.4f}-{high:.4f}) | {found['top1'][arm][0]:.1%} | {shown} | {cost} |")
    lines.append("\nOurs minus theirs, nats per token, document by document:\n")
    asked = [(f"ours-qad-{n}", f"modelopt-qad{rate}-{n}") for n in tokens for rate in ("", "-1e-4")]
    asked += [(ours, f"llm-compressor-{method}") for method in ("gptq", "rtn") for ours in ("ours-gptq", "ours-ptq")]
    for ours, theirs in asked:
        difference = found["kl_difference"].get(f"{ours} - {theirs}")
        if difference is not None:
            said = "nearer to BF16" if difference[2] < 0 else "farther" if difference[1] > 0 else "the interval tells neither"
            value, low, high = difference
            lines.append(f"- {ours} - {theirs}: {value:+.4f} ({low:+.4f} to {high:+.4f}): {said}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    for text in ("calibration", "train", "test"):
        parser.add_argument(f"--{text}", type=Path, required=True, help="a text file, taken whole")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--llm-compressor", metavar="PYTHON", help="of an environment with llmcompressor; none leaves it out")
    parser.add_argument("--tokens", type=int, nargs="+", default=[12800], help="of QAD, all sides alike")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="make these alone")
    parser.add_argument("--no-measure", action="store_true", help="make, and measure another time")
    args = parser.parse_args()
    steps = steps_of(args)
    for step in steps:
        if any(fnmatch.fnmatch(step.name, glob) for glob in args.only):
            make(step, args.out)
    if args.no_measure:
        return
    done = [step for step in steps if (args.out / "made" / f"{step.name}.json").exists()]
    found = measure(args, {arm: folder for step in done for arm, folder in step.folders.items()})
    made = {step.name: json.loads((args.out / "made" / f"{step.name}.json").read_text()) for step in done}
    (args.out / "result.json").write_text(json.dumps({**found, "made": made}, indent=1) + "\n")
    (args.out / "result.md").write_text(page(found, made, args.tokens))
    print((args.out / "result.md").read_text())


if __name__ == "__main__":
    main()
