"""ModelOpt's side of `make bench-recovery`: its PTQ and its plain QAD, on the windows of our run, exported by itself.

QAD as its example trains: the quantized model (max calibration, scales frozen), forward KL to the BF16 original, AdamW without
weight decay, gradients clipped at 1, a window a step, nothing else. Two liberties, both in its favour or neutral: masters are
FP32 under BF16 autocast (its example loads BF16 weights, on which a rate of 1e-5 is mostly rounded away), and what quantizes is
`qad.numerics`, hooked in as a backend of its quantizers, since its own NVFP4 kernels need a GPU. Seconds are therefore not
those of its kernels.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from qad.numerics.nvfp4 import fake_quantize, fake_quantize_activation, global_scale_from_amax
from qad.text.windows import StoredWindows

DTYPE = torch.bfloat16
WARMUP = 16  # steps, where the rate falls linearly: as in our recipe


def quantized(model: Path, windows: StoredWindows) -> Any:
    """The BF16 model with calibrated quantizers on every Linear but lm_head."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.nn import register_quant_backend

    register_quant_backend("weight", lambda w, quantizer: fake_quantize(w, global_scale_from_amax(quantizer.amax)))
    register_quant_backend("input", lambda x, quantizer: fake_quantize_activation(x, global_scale_from_amax(quantizer.amax)))
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    for entry in config["quant_cfg"]:
        if entry["quantizer_name"] in ("*weight_quantizer", "*input_quantizer"):
            entry["cfg"]["backend"] = entry["quantizer_name"].strip("*").removesuffix("_quantizer")

    def forward(calibrated: Any) -> None:
        for batch in windows.batches(8):
            calibrated(**batch.model_inputs("cpu"))

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPE).eval()
    with torch.no_grad():
        mtq.quantize(loaded, config, forward)
    return loaded


def train(student: Any, teacher: Any, windows: StoredWindows, steps: int, lr: float, schedule: str) -> None:
    """The student's masters in place."""
    student.float().train()
    adam = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        if schedule == "linear":
            warm = min(WARMUP, steps - 1)
            factor = (step + 1) / warm if step < warm else (steps - step) / (steps - warm)
            adam.param_groups[0]["lr"] = lr * factor
        inputs = windows.at(torch.tensor([step])).model_inputs("cpu")
        with torch.no_grad():
            wanted: Tensor = teacher(**inputs).logits.float().log_softmax(-1).flatten(0, -2)
        with torch.autocast("cpu", DTYPE):
            logits: Tensor = student(**inputs).logits
        found = logits.float().log_softmax(-1).flatten(0, -2)
        loss = torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        adam.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"modelopt: step {step + 1}/{steps}, kl {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("windows", type=Path, help="RUN/text/windows")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=0, help="of QAD; 0 is PTQ")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--schedule", choices=["constant", "linear"], default="constant")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    from modelopt.torch.export import export_hf_checkpoint

    torch.manual_seed(0)
    student = quantized(args.model, StoredWindows(args.windows / "calibration"))
    if args.tokens:
        windows = StoredWindows(args.windows / "train")
        teacher = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPE).eval()
        train(student, teacher, windows, args.tokens // windows.seq_len, args.lr, args.schedule)
    export_hf_checkpoint(student.to(DTYPE).eval(), export_dir=args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)


if __name__ == "__main__":
    main()
