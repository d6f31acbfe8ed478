"""A teacher's distributions on disk: its top K log-probabilities and the mass of the rest, for every counted token.

Worth its disk where the same windows are seen more than once (epochs, or several runs that differ in their settings):
a step then costs no teacher. 8 K + 4 bytes a token; exact at K = V, a lower bound of the KL below.

    CACHE/shard-00000.safetensors     log_p_tK float32, ids_tK int32, log_tail_t float32, first_S int64
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from qad.artifact import Artifact, open_artifact, run_stage
from qad.text.windows import WindowSet
from qad.training.head import Head
from qad.training.losses import TopK
from qad.training.ranks.group import here
from qad.training.ranks.shards import gathered

KIND = "teacher_cache"
_SHARD = 64  # windows


class TeacherCache:
    """A finished cache, opened; tensors are memory-mapped."""

    def __init__(self, folder: Path, windows: WindowSet) -> None:
        self.folder = folder
        self._counts = windows.counts

    def read(self, index: Tensor, device: torch.device) -> TopK:
        """The counted tokens of windows[index], in order."""
        parts = [self._window(int(window)) for window in index]
        log_p, ids, tail = (torch.cat(tensors).to(device) for tensors in zip(*parts, strict=True))
        return TopK(log_p, ids.long(), tail)

    def _window(self, window: int) -> tuple[Tensor, Tensor, Tensor]:
        shard = window // _SHARD
        start = int(self._counts[shard * _SHARD : window].sum())
        rows = slice(start, start + int(self._counts[window]))
        with safe_open(self.folder / f"shard-{shard:05d}.safetensors", framework="pt") as file:
            return tuple(file.get_slice(name)[rows] for name in ("log_p_tK", "ids_tK", "log_tail_t"))


@torch.no_grad()
def write_teacher_cache(
    out: Path,
    teacher: Any,
    windows: WindowSet,
    k: int,
    shared: int,
    inputs: dict[str, str],
    config: dict[str, object],
    progress: Callable[[int], object] = lambda tokens: None,
) -> Artifact:
    """Run the teacher over every window once. `inputs`: digests of teacher and windows; a cache of the same ones with
    the same K is reused."""
    k, ranks = min(k, shared), here()
    asked = False

    def work(folder: Path) -> None:
        nonlocal asked
        asked = True
        _fill(ranks.of_first(folder), teacher, windows, k, shared, progress)

    if ranks.first:
        run_stage(KIND, out, {"k": k, "shared": shared, **config}, inputs, work, replace=True)
        if not asked:
            ranks.of_first(None)
    elif (folder := ranks.of_first(out)) is not None:
        _fill(folder, teacher, windows, k, shared, progress)
    ranks.wait()
    return open_artifact(out, KIND)


def _fill(folder: Path, teacher: Any, windows: WindowSet, k: int, shared: int, progress: Callable[[int], object]) -> None:
    """Ranks take shards in turns, and all run the teacher as often."""
    head, ranks = Head.of(teacher).sharing(shared), here()
    for turn, first in enumerate(ranks.part(range(0, len(windows), _SHARD))):
        longest = min(_SHARD, len(windows) - turn * ranks.size * _SHARD)
        parts = []
        for place in range(longest):
            window = place if first is None else min(first + place, len(windows) - 1)
            part = _distributions(teacher, head, windows, window, k)
            if first is not None and first + place < len(windows):
                parts.append(part)
                progress(windows.seq_len)
        if first is not None:
            log_p, ids, tail = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            tensors = {"log_p_tK": log_p, "ids_tK": ids, "log_tail_t": tail}
            save_file(tensors, folder / f"shard-{first // _SHARD:05d}.safetensors")
    ranks.wait()


def _distributions(model: Any, head: Head, windows: WindowSet, window: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    device = head.weight_VH.device
    one = windows.at(torch.tensor([window]))

    def shortened() -> list[TopK]:
        hidden_BTH = model.base_model(**one.model_inputs(device)).last_hidden_state
        hidden_TH = hidden_BTH[0][one.counted_ST[0].to(device)]
        return [TopK.of(head.logits(part), k) for part in hidden_TH.split(512)]

    parts = gathered(model, shortened)
    if not parts:
        return torch.empty(0, k), torch.empty(0, k, dtype=torch.int32), torch.empty(0)
    joined = [torch.cat([getattr(p, n) for p in parts]).cpu() for n in ("log_p_tK", "ids_tK", "log_tail_t")]
    return joined[0], joined[1].int(), joined[2]
