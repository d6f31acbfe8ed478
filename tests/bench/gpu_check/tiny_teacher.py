"""A small BF16 Llama with a tokenizer, trained here and now on text that every Python brings: a teacher without a download.

Shape suffixes: S windows, T tokens.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qad.text.documents import Document, split_of

EOS = "<|endoftext|>"
_MINIMUM = 200  # characters of a text


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a Llama with tied embeddings and grouped-query attention (two query heads a key head)."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    intermediate: int


def domains(files: int) -> tuple[list[str], list[str]]:
    """Two kinds of text from the first `files` modules of the standard library and the language reference, where that is
    installed: prose (documentation) and code (functions and classes without any)."""
    library = Path(sysconfig.get_paths()["stdlib"])
    prose: dict[str, None] = {}
    code: dict[str, None] = {}
    topics = library / "pydoc_data" / "topics.py"
    if topics.is_file():
        tree = ast.parse(topics.read_text(encoding="utf-8"))
        prose |= {n.value: None for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    for file in sorted(library.glob("*.py"))[:files]:
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                prose[ast.get_docstring(node) or ""] = None
                undocumented = [n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
                node.body = undocumented or [ast.Pass()]
        code |= {ast.unparse(n): None for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    return [t for t in prose if len(t) >= _MINIMUM], [t for t in code if len(t) >= _MINIMUM]


def make_tokenizer(folder: Path, texts: Sequence[str], vocabulary: int) -> None:
    """A byte-level BPE tokenizer trained on `texts`, saved into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(unk_token=None))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[EOS], show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=EOS, eos_token=EOS, pad_token=EOS)
    tokenizer.save_pretrained(folder)


def new_llama(size: Size, seed: int = 0) -> Any:
    """An untrained LlamaForCausalLM, FP32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            intermediate_size=size.intermediate,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def train_teacher(
    folder: Path,
    texts: Sequence[str],
    size: Size,
    steps: int,
    batch: int,
    seq_len: int = 128,
    lr: float = 2e-3,
    seed: int = 0,
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
) -> float:
    """Train on the train split of `texts` and save the model in BF16 beside the tokenizer that `folder` holds already, or a new
    one. Returns the mean cross-entropy of the last tenth of the steps, nats per token."""
    from transformers import AutoTokenizer

    own = [text for text in texts if split_of(Document.of(text)) == "train"]
    if not (folder / "tokenizer.json").is_file():
        make_tokenizer(folder, own, size.vocabulary)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = new_llama(size, seed).to(device)
    windows_ST = windows_of(tokenizer, own, seq_len)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rate = min(1.0, (step + 1) / 20) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = lr * rate
        ids_BT = windows_ST[torch.randint(len(windows_ST), (batch,), generator=generator)].to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % max(1, steps // 4) == 0:
            say(f"teacher step {step + 1}/{steps}: cross-entropy {float(loss.detach()):.3f}")
    model.to(torch.bfloat16).save_pretrained(folder)
    return float(torch.stack(losses[-max(1, steps // 10) :]).mean())


def windows_of(tokenizer: Any, texts: Sequence[str], seq_len: int) -> Tensor:
    """The texts end to end, each behind EOS, cut into windows [S, T]."""
    ids: list[int] = []
    for encoded in tokenizer([EOS + text for text in texts], verbose=False)["input_ids"]:
        ids += encoded
    usable = len(ids) // seq_len * seq_len
    return torch.tensor(ids[:usable]).view(-1, seq_len)
