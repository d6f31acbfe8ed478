"""What decides a score besides the model: generation settings, template, first token ids. Made explicit, and recorded.

An engine fills what a request leaves open from the checkpoint's generation_config, which is the model's, not the
protocol's; so nothing is left open. The first ids of the first prompt show whether two arms saw the same text with one
BOS; records that differ in them are not compared.
"""

from __future__ import annotations

from typing import Any

from qad.errors import DataError

FIRST_IDS = 8
GREEDY = {"do_sample": False, "temperature": 0.0}
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def explicit_generation(task: Any) -> None:
    """Write every sampling setting that the task's file leaves open into its generation settings."""
    if task.OUTPUT_TYPE != "generate_until":
        return
    own = dict(task.get_config("generation_kwargs") or {})
    sampled = own.get("do_sample", bool(own.get("temperature")))
    filled = {**(_SAMPLING if sampled else GREEDY), **own, "do_sample": bool(sampled)}
    task.set_config(key="generation_kwargs", value=filled)


def require_room(name: str, task: Any, lm: Any) -> None:
    """Raises DataError where the tokens to generate leave no room for a prompt, which would be cut to nothing."""
    if task.OUTPUT_TYPE != "generate_until":
        return
    wanted = int((task.get_config("generation_kwargs") or {}).get("max_gen_toks", lm.max_gen_toks))
    if wanted >= lm.max_length:
        raise DataError(
            f"task {name} generates up to {wanted} tokens, the model takes {lm.max_length} with the prompt: lower "
            "max_gen_toks in the task's generation_kwargs"
        )


def protocol(name: str, task: Any, lm: Any, samples: list[dict[str, Any]], think_end: str | None = None) -> dict[str, object]:
    """Facts of a task as it was run, plain JSON. Raises DataError for a prompt that begins with two BOS tokens.

    first_ids is [] where the engine alone knows the tokens: a server that is sent conversations.
    """
    encoded = lm.tok_encode(samples[0]["arguments"][0][0])
    ids = list(encoded)[:FIRST_IDS] if isinstance(encoded, list) else []
    bos = getattr(lm.tokenizer, "bos_token_id", None)
    if bos is not None and ids[:2] == [bos, bos]:
        raise DataError(f"task {name}: prompts begin with two BOS tokens: take the BOS out of the task's text or template")
    facts: dict[str, object] = {"output_type": task.OUTPUT_TYPE, "chat_template": None, "first_ids": ids}
    if task.OUTPUT_TYPE == "generate_until":
        facts["generation"] = dict(task.get_config("generation_kwargs") or {})
        facts["think_end"] = think_end
    return facts
