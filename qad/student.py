"""The student: a transformers model whose parameters are, at every step, exactly what would be deployed.

    masters (FP32)  --deploy-->  parameters (compute dtype)  --forward, backward-->  gradients  --STE-->  masters

`deploy` decodes the quantized form of every selected weight (scales recomputed from the current masters, shared
within a scale group) and rounds every other parameter to BF16, as the exporter will. Quantizing is thus done once a
step, not once a call; the forward pass is that of the reloaded export, and the straight-through estimator is the
statement that a master receives its deployed parameter's gradient. Gradients of micro-batches add up in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qad.arm import Arm, group_global_scale
from qad.errors import ArtifactError
from qad.linear import wrap_linears
from qad.nvfp4 import fake_quantize


class Student:
    """A model, its FP32 masters by parameter name, and the selection that says how they are deployed.

    It takes over the arm's source model, whose parameters become the student's, and deploys the arm's weights.
    Raises ArtifactError for an arm that quantizes nothing.
    """

    def __init__(self, arm: Arm, model: nn.Module) -> None:
        if arm.selection is None:
            raise ArtifactError(f"{arm.folder} quantizes nothing: a student starts from a PTQ or QAD arm")
        self.model: Any = model
        self.selection = arm.selection
        wrap_linears(model, {name: arm.input_scales.get(name) for name in self.selection.modules})
        self.masters: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            master = arm.weight(name).to(device=parameter.device, dtype=torch.float32, copy=True)
            self.masters[name] = master.requires_grad_()
            parameter.requires_grad_().register_post_accumulate_grad_hook(self._to_master(name))
        self.deploy()

    def _to_master(self, name: str) -> Any:
        def move(parameter: Tensor) -> None:
            master, grad = self.masters[name], parameter.grad
            assert grad is not None
            master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

        return move

    @torch.no_grad()
    def deploy(self) -> None:
        """Write into the model what the exporter would write into a checkpoint, decoded."""
        parameters = dict(self.model.named_parameters())
        deployed: set[str] = set()
        for group in self.selection.groups:
            weights = {f"{module}.weight": self.masters[f"{module}.weight"] for module in group}
            scale = group_global_scale(weights)
            for name, master in weights.items():
                parameters[name].copy_(fake_quantize(master, scale))
            deployed.update(weights)
        for name, parameter in parameters.items():
            if name not in deployed:
                parameter.copy_(self.masters[name].to(torch.bfloat16))

    @torch.no_grad()
    def load_masters(self, masters: dict[str, Tensor]) -> None:
        """Raises KeyError where the names differ."""
        if masters.keys() != self.masters.keys():
            raise KeyError(
                f"masters differ from the model's parameters: {sorted(masters.keys() ^ self.masters.keys())[:3]}"
            )
        for name, value in masters.items():
            self.masters[name].copy_(value)
        self.deploy()
