"""BF16 Linears on a CPU without BF16 units: the same product, several times as fast.

torch's own BF16 product accumulates in FP32 and rounds once; without BF16 instructions it does so number by number. The
same numbers as FP32 go through the FP32 product instead, whose result is rounded to BF16: sums may differ in their order only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


def multiplies_bfloat16(device: str) -> bool:
    """True where the hardware multiplies BF16 natively."""
    if not device.startswith("cpu"):
        return True
    cpu: Any = torch.cpu
    return any(getattr(cpu, f"_is_{name}_supported", lambda: False)() for name in ("avx512_bf16", "amx_tile"))


def widened_linears(device: str) -> contextlib.AbstractContextManager[object]:
    """Within the block, F.linear of BF16 tensors multiplies in FP32 where `device` has no BF16 units. One weight at a time
    exists in FP32; for work without gradients."""
    return contextlib.nullcontext() if multiplies_bfloat16(device) else _Widened()


class _Widened(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or not args or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        widened = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        named = {name: arg.float() if isinstance(arg, torch.Tensor) else arg for name, arg in kwargs.items()}
        return func(*widened, **named).to(torch.bfloat16)
