"""lm-eval's voice, turned off: its log lines and its progress bars."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import datasets
import lm_eval.api.model
import lm_eval.api.task
import lm_eval.models.huggingface as hf


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines and no progress bars from lm-eval and datasets, whose bars have no switch. What fails raises; what lm-eval
    logs of a server's replies is as long as they are."""
    modules: list[Any] = [lm_eval.api.task, lm_eval.api.model, hf]
    bars = [module.tqdm for module in modules]
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    shown = not datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    for module, bar in zip(modules, bars, strict=True):
        module.tqdm = _without_bar(bar)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for module, bar in zip(modules, bars, strict=True):
            module.tqdm = bar
        if shown:
            datasets.enable_progress_bars()


def _without_bar(bar: Any) -> Any:
    return lambda *args, **kwargs: bar(*args, **{**kwargs, "disable": True})
