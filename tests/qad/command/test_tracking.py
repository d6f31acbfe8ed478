"""The optional tracker: asked by three calls, off by default, missing it is said at once, and its trouble ends nothing."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from qad.command.tracking import Tracker, require_tracker, tracking
from qad.errors import UsageError
from qad.recipes.load import parse_recipe
from qad.recipes.recipe import Recipe, Track

Calls = list[tuple[str, Any]]


def recipe(**more: Any) -> Recipe:
    return parse_recipe(
        {
            "model": "owner/model",
            "calibrate": {"data": "python-docs"},
            "train": {"data": "python-docs", "tokens": 65536, "lr": 1e-5},
            **more,
        },
        "recipe",
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A module named trackio that writes down how it was called."""
    found: Calls = []
    module = types.ModuleType("trackio")
    module.__spec__ = types.SimpleNamespace(name="trackio")  # type: ignore[assignment]
    module.init = lambda **given: found.append(("init", given))  # type: ignore[attr-defined]
    module.log = lambda values: found.append(("log", values))  # type: ignore[attr-defined]
    module.finish = lambda: found.append(("finish", None))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    return found


def test_off_by_default() -> None:
    assert recipe().track is None
    with tracking(recipe(), "run") as tracker:
        tracker.log("qad", {"kl": 1.0})


def test_one_run_with_the_recipe_and_finite_numbers(calls: Calls) -> None:
    with tracking(recipe(track={"to": "trackio"}), "run") as tracker:
        tracker.log("qad", {"step": 3, "kl": 0.25, "val_kl": None, "lr": float("nan"), "done": True, "name": "x"})
        tracker.log("qad", {"val_kl": None})
    (_, given), *others = calls
    assert (given["project"], given["name"], given["config"]["model"]) == ("nvfp4-qad", "run", "owner/model")
    assert others == [("log", {"qad/step": 3, "qad/kl": 0.25}), ("finish", None)]


def test_the_run_is_finished_whatever_happens(calls: Calls) -> None:
    with pytest.raises(RuntimeError), tracking(recipe(track={"to": "trackio"}), "run"):
        raise RuntimeError
    assert calls[-1] == ("finish", None)


def test_a_tracker_that_fails_is_left_alone_with_one_warning(calls: Calls) -> None:
    def fail(values: Any) -> None:
        raise ConnectionError("no route")

    sys.modules["trackio"].log = fail  # type: ignore[attr-defined]
    with tracking(recipe(track={"to": "trackio"}), "run") as tracker:
        with pytest.warns(UserWarning, match=r"trackio failed \(no route\): nothing more is tracked"):
            tracker.log("qad", {"kl": 1.0})
        tracker.log("qad", {"kl": 2.0})  # a second warning would be an error
    assert [name for name, _ in calls] == ["init"]


def test_a_library_that_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"track\.to is wandb, which is not installed: pip install wandb"):
        require_tracker(Track(to="wandb"))
    require_tracker(None)


def test_no_stage_is_keyed_by_it() -> None:
    """Switching it on or off must not train again."""
    plain, tracked = recipe(), recipe(track={"to": "trackio"})
    for name in ("quantize", "calibrate", "train", "export", "measure"):
        assert plain.section(name) == tracked.section(name)
    Tracker().finish()
