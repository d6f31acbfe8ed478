"""The teacher on disk: what is read is what the live teacher says, shortened; kept by content; windows in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qad.model.loader import load_model
from qad.model.source import open_checkpoint
from qad.text.windows import Windows
from qad.training import teacher_cache
from qad.training.head import Head
from qad.training.losses import TopK
from qad.training.teacher_cache import TeacherCache, write_teacher_cache


@pytest.fixture(scope="module")
def teacher(tiny_llama_dir: Path) -> Any:
    return load_model(open_checkpoint(tiny_llama_dir), "float32", "cpu")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    """Seven windows over three shards, unevenly supervised, one not at all."""
    monkeypatch.setattr(teacher_cache, "_SHARD", 3)
    ids = torch.randint(3, 500, (7, 16), generator=torch.Generator().manual_seed(0))
    supervised = torch.rand(7, 16, generator=torch.Generator().manual_seed(1)) < 0.5
    supervised[4] = False
    return Windows.of(ids, torch.arange(16).expand(7, -1).clone(), supervised)


def write(out: Path, teacher: Any, windows: Windows, k: int) -> Any:
    return write_teacher_cache(out, teacher, windows, k, 512, {"teacher": "t", "windows": windows.digest}, {})


@torch.no_grad()
def test_every_window_reads_back_as_the_live_teacher(teacher: Any, windows: Windows, tmp_path: Path) -> None:
    write(tmp_path / "cache", teacher, windows, 9)
    cache = TeacherCache(tmp_path / "cache", windows)
    for index in (torch.tensor([6, 0, 4, 3]), torch.tensor([4]), torch.arange(7)):
        found = cache.read(index, torch.device("cpu"))
        hidden = [
            teacher.base_model(
                windows.input_ids_ST[i, None], position_ids=windows.position_ids_ST[i, None], use_cache=False
            ).last_hidden_state[0][windows.counted_ST[i]]
            for i in index
        ]
        wanted = [TopK.of(Head.of(teacher).logits(h), 9) for h in hidden if len(h)]
        assert found.ids_tK.dtype == torch.int64
        for name in ("log_p_tK", "ids_tK", "log_tail_t"):
            parts = [getattr(w, name) for w in wanted]
            assert torch.equal(getattr(found, name), torch.cat(parts) if parts else getattr(found, name)[:0])


def test_the_same_teacher_and_windows_are_not_asked_twice(teacher: Any, windows: Windows, tmp_path: Path) -> None:
    first = write(tmp_path / "cache", teacher, windows, 4)
    assert write(tmp_path / "cache", None, windows, 4).digest == first.digest
    again = write(tmp_path / "cache", teacher, Windows.of(windows.input_ids_ST[:6], windows.position_ids_ST[:6]), 4)
    assert again.digest != first.digest


def test_more_than_the_vocabulary_is_the_vocabulary(teacher: Any, windows: Windows, tmp_path: Path) -> None:
    write(tmp_path / "cache", teacher, windows, 10_000)
    found = TeacherCache(tmp_path / "cache", windows).read(torch.arange(7), torch.device("cpu"))
    assert found.log_p_tK.shape == (windows.counted, 512)
    assert (found.log_tail_t == -torch.inf).all()
