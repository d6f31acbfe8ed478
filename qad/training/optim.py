"""What trains, how fast, with which optimizer: the update side of the loop.

Weights move by 1e-6 of themselves a step, which BF16 cannot hold, so the optimizer owns FP32 masters. Its step size
is lr(step) * lr_scale of the parameter; parameters outside `trainable` are frozen and cost no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from qad.errors import UsageError
from qad.recipes.recipe import Train


def learning_rate(config: Train, step: int) -> float:
    """Rate of step 1, 2, ...: linear warm-up, then constant, or down to zero linearly or as a cosine."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.lr * (1.0 - done)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr


def parameter_groups(config: Train, masters: Mapping[str, Tensor]) -> list[dict[str, object]]:
    """Optimizer groups of the trainable masters, one for each `lr_scale`; the first pattern that matches counts."""
    names = [name for name, master in masters.items() if master.requires_grad]
    groups: dict[float, list[Tensor]] = {}
    for name in names:
        scale = next((s for pattern, s in config.lr_scale.items() if fnmatchcase(name, pattern)), 1.0)
        groups.setdefault(scale, []).append(masters[name])
    return [{"params": params, "lr": config.lr * scale, "lr_scale": scale} for scale, params in groups.items()]


def make_optimizer(config: Train, masters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW without weight decay; its moments in FP32, in the host's memory on request, or in 8 bits by torchao. Raises
    UsageError where the library is absent."""
    groups = parameter_groups(config, masters)
    if config.optimizer != "adamw8bit":
        kind = torch.optim.AdamW if config.optimizer == "adamw" else OffloadedAdamW
        return kind(groups, lr=config.lr, betas=config.betas, weight_decay=0.0, fused=True)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UsageError(
            f"train.optimizer {config.optimizer!r} needs torchao: pip install 'nvfp4-qad[optim]', or use adamw"
        ) from error
    return AdamW8bit(groups, lr=config.lr, betas=config.betas, weight_decay=0.0)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments lie in the host's memory between steps: of one parameter at a time they are on its device. The same
    kernel on the same numbers, so the same bits; it costs 16 bytes a parameter over the bus and back, a step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """`closure` is refused: nothing here evaluates a loss twice."""
        assert closure is None
        held, groups = self.param_groups, [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        try:
            for group, parameter in groups:
                if parameter.grad is None:
                    continue
                self._move(parameter, parameter.device)
                self.param_groups = [{**group, "params": [parameter]}]
                super().step()
                self._move(parameter, torch.device("cpu"))
        finally:
            self.param_groups = held

    def _move(self, parameter: Tensor, device: torch.device) -> None:
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name] = state[name].to(device)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao compiles its step around it
            group["lr"].fill_(lr * group["lr_scale"])
        else:
            group["lr"] = lr * group["lr_scale"]
