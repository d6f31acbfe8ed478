"""What vLLM's log says of a CPU that has no FP4 units."""

from __future__ import annotations

import functools
import logging

EMULATED = "NVFP4 is emulated on this CPU (FP8 as well): its values, not its speed or memory. Weights are decoded once, to %s."
LOGGER = logging.getLogger("vllm.qad_nvfp4")  # below vLLM's own, whose handlers print it


@functools.cache
def say_emulated(dtype: object) -> None:
    """Once a process, in vLLM's log."""
    LOGGER.warning(EMULATED, str(dtype).removeprefix("torch."))
