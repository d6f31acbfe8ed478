"""Fixtures for all tests: no network, tiny models with tokenizers, and skips that cannot hide.

REQUIRE=exact,engine turns the skips of those markers into failures.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# Under pytest-xdist every worker has a core.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

TEXT = """The river runs past the old mill and under a stone bridge. In spring the water is high and brown.
A heron stands where the bank is low. It waits for a fish, then moves one leg, slowly, and waits again.
Children throw bread to the ducks on Sunday. The miller counts his sacks: seven, eight, nine.
When the wheel turns the floor shakes, and flour falls like snow from every beam in the house.
"""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test reached for the network: {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    required = {name for name in os.environ.get("REQUIRE", "").split(",") if name}
    names = {mark.name for mark in item.iter_markers()}
    if report.skipped and names & required:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, but REQUIRE names its marker: {report.longrepr}"
    return report


def build_tokenizer(folder: Path) -> Any:
    """A byte-level BPE tokenizer of 512 ids with a chat template, saved into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(unk_token=None))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([TEXT] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"  # as the hub's models have it
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    return tokenizer


def build_llama(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A BF16 Llama (hidden 64, intermediate 128, 2 layers, GQA 4/2, vocab 512, tied) with tokenizer, saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides})), folder)


def _save(fresh: Any, folder: Path) -> Path:
    model = fresh.to(torch.bfloat16)
    with torch.no_grad():  # norms of a fresh model are all ones, which would hide a lost norm
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
            elif parameter.dim() >= 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    build_tokenizer(folder)
    return folder


def build_qwen3(folder: Path, kind: str = "qwen3", seed: int = 0, **overrides: Any) -> Path:
    """A BF16 qwen3, qwen3_moe or mixtral of the sizes of the tiny Llama (experts: 4 of intermediate 32, 2 a token), saved."""
    import transformers

    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    sizes |= {
        "qwen3": {},
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32},
        "mixtral": {"num_local_experts": 4, "intermediate_size": 32},
    }[kind]
    name = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}[kind]
    if kind == "qwen3":
        del sizes["num_experts_per_tok"]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**sizes, **overrides})
    return _save(getattr(transformers, f"{name}ForCausalLM")(config), folder)


@pytest.fixture(scope="session")
def make_qwen3() -> Callable[..., Path]:
    """Saves a tiny qwen3, qwen3_moe or mixtral into a folder: make_qwen3(folder, kind, seed=0, **config)."""
    return build_qwen3


@pytest.fixture(scope="session", params=["qwen3_moe", "mixtral"])
def moe_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved BF16 tiny mixture of experts with tokenizer; read only."""
    return build_qwen3(tmp_path_factory.mktemp("moe") / request.param, request.param)


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Path]:
    """Saves a tiny Llama into a folder: make_llama(folder, seed=0, **config)."""
    return build_llama


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[Path], Any]:
    """Saves a tokenizer of 512 ids into a folder: make_tokenizer(folder)."""
    return build_tokenizer


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved BF16 tiny Llama with tokenizer; read only."""
    return build_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def sums_task() -> str:
    """YAML of an lm-eval task `sums`: up to 6 tokens behind each `query` of rows.jsonl, an exact match with its `answer`."""
    return """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: query
doc_to_target: answer
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
