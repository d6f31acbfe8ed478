"""The update side: masters move where BF16 cannot, patterns choose what trains and how fast."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qad.errors import UsageError
from qad.recipes.recipe import Train
from qad.recipes.trainable import check_patterns, trainable_names
from qad.training.optim import make_optimizer, parameter_groups, set_learning_rate
from qad.training.state import load_state, save_state

NAMES = ["model.embed.weight", "model.0.mlp.up_proj.weight", "model.0.mlp.down_proj.weight", "model.norm.weight"]
LINEARS = ["model.0.mlp.up_proj", "model.0.mlp.down_proj"]


def config(**values: object) -> Train:
    return Train.model_validate({"data": "python-docs", "tokens": 512, "seq_len": 32, **values})


def masters(frozen: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    return {name: torch.full((4, 4), 0.01).requires_grad_(name not in frozen) for name in NAMES}


def test_c10_fp32_masters_move_at_1e6_where_bf16_weights_do_not() -> None:
    """All weights 0.01, constant gradient, AdamW 1e-6, 100 steps: the master ends at about 0.0099."""
    weights = masters()
    optimizer = make_optimizer(config(lr=1e-6), weights)
    low = torch.full((4, 4), 0.01, dtype=torch.bfloat16).requires_grad_()
    naive = torch.optim.AdamW([low], lr=1e-6, weight_decay=0.0)
    before = low.detach().clone()
    for _ in range(100):
        for weight in (*weights.values(), low):
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        naive.step()
    assert weights[NAMES[0]][0, 0].item() == pytest.approx(0.0099, abs=1e-6)
    assert torch.equal(low.detach(), before)


def test_what_trains() -> None:
    assert trainable_names(config(), NAMES, LINEARS) == set(NAMES)
    assert trainable_names(config(), [*NAMES, "model.visual.blocks.0.attn.qkv.weight"], LINEARS) == set(NAMES)
    assert len(trainable_names(config(trainable=["*"]), [*NAMES, "model.visual.proj.weight"], LINEARS)) == len(NAMES) + 1
    assert trainable_names(config(trainable="linears"), NAMES, LINEARS) == {f"{name}.weight" for name in LINEARS}
    assert trainable_names(config(trainable=["*norm*", "*up_proj*"]), NAMES, LINEARS) == {NAMES[1], NAMES[3]}
    with pytest.raises(UsageError, match=r"train.trainable: pattern '\*.attn.\*' matches no trainable parameter"):
        check_patterns(config(trainable=["*.attn.*"]), NAMES, LINEARS)
    with pytest.raises(UsageError, match=r"train.lr_scale: pattern '\*embed\*' matches no trainable parameter"):
        check_patterns(config(trainable="linears", lr_scale={"*embed*": 0.1}), NAMES, LINEARS)


def test_lr_scale_multiplies_the_schedule_and_the_first_match_counts() -> None:
    weights = masters(frozen=(NAMES[3],))
    optimizer = make_optimizer(config(lr=0.5, lr_scale={"*up_proj*": 0.1, "*.mlp.*": 2.0}), weights)
    set_learning_rate(optimizer, 0.25)
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert [rates.get(id(weights[name])) for name in NAMES] == [0.25, 0.025, 0.5, None]


def test_the_plain_case_is_one_group() -> None:
    (group,) = parameter_groups(config(), masters())
    assert len(group["params"]) == 4
    assert group["lr_scale"] == 1.0


def test_moments_in_8_bits_step_like_adamw_and_are_saved_by_their_parts(tmp_path: Path) -> None:
    """One parameter, so that torchao compiles one step. Resumed, the next step has the same bits."""
    weight, settings = torch.linspace(-1, 1, 4096).view(64, 64), config(lr=1e-3, optimizer="adamw8bit")
    exact, eight = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    optimizers = [make_optimizer(config(lr=1e-3), {"w": exact}), make_optimizer(settings, {"w": eight})]

    def step(weight: torch.Tensor, optimizer: torch.optim.Optimizer, number: int) -> None:
        set_learning_rate(optimizer, 1e-3 / number)
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(number))
        optimizer.step()

    for number in (1, 2):
        for master, optimizer in zip((exact, eight), optimizers, strict=True):
            step(master, optimizer, number)
    moved = exact.detach() - weight
    assert (eight.detach() - weight - moved).norm() < 0.1 * moved.norm()

    save_state(tmp_path, 2, {"w": eight}, optimizers[1], {"step": 2}, {"w": 64})
    stored = load_file(tmp_path / "state-00000002" / "tensors.safetensors")
    assert stored["exp_avg:codes.w"].dtype == torch.uint8
    resumed = weight.clone().requires_grad_()
    again = make_optimizer(settings, {"w": resumed})
    found = load_state(tmp_path, {"w": resumed}, again, {"w": 64})
    assert found is not None
    with torch.no_grad():
        resumed.copy_(found[1]["w"])
    step(eight, optimizers[1], 3)
    step(resumed, again, 3)
    assert torch.equal(resumed.view(torch.int32), eight.view(torch.int32))


def test_a_missing_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UsageError, match=r"needs torchao: pip install 'nvfp4-qad\[optim\]'"):
        make_optimizer(config(optimizer="adamw8bit"), masters())


def test_offloaded_moments_give_the_bits_of_adamw(tmp_path: Path) -> None:
    found = {}
    for name in ("adamw", "adamw_offloaded"):
        weights = masters(frozen=(NAMES[3],))
        lengths = {name: len(weight) for name, weight in weights.items()}
        optimizer = make_optimizer(config(lr=1e-3, lr_scale={"*up_proj*": 0.1}, optimizer=name), weights)
        for step in range(4):
            set_learning_rate(optimizer, 1e-3 / (step + 1))
            generator = torch.Generator().manual_seed(step)
            for weight in list(weights.values())[: 2 + step % 2]:  # one without a gradient now and then
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        save_state(tmp_path, 4, weights, optimizer, {"step": 4}, lengths)
        found[name] = load_file(tmp_path / "state-00000004" / "tensors.safetensors")
        again = make_optimizer(config(optimizer=name), weights)
        assert load_state(tmp_path, weights, again, lengths) is not None
        (tmp_path / "state-00000004").rename(tmp_path / name)
    one, other = found.values()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
