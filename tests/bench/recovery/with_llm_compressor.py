"""llm-compressor's side of `make bench-recovery`, run by the Python of its environment: nothing of this project is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path, help="ids.int32 of our calibration windows")
    parser.add_argument("seq_len", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", choices=["rtn", "gptq"], required=True)
    args = parser.parse_args()
    ids = np.fromfile(args.ids, dtype=np.int32).reshape(-1, args.seq_len)
    windows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    modifier = {"rtn": QuantizationModifier, "gptq": GPTQModifier}[args.method]
    oneshot(
        model=model,
        processor=tokenizer,
        dataset=windows,
        recipe=modifier(targets="Linear", scheme="NVFP4", ignore=["lm_head"]),
        max_seq_length=args.seq_len,
        num_calibration_samples=len(ids),
    )
    model.save_pretrained(args.out, save_compressed=True)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
