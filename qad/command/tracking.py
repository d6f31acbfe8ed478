"""Metrics to an experiment tracker through its own library, where the recipe asks for one (`track:`). Off by default.

trackio and wandb share three calls: init, log, finish. One run holds the training of every arm (`qad/kl`, `qad/step`) and
at the end the report's numbers (`report/recovery/qad/TASK`). What a tracker holds is a copy: metrics.jsonl and the records
are the measurement, and a tracker that fails is left alone with one warning.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from qad.errors import UsageError
from qad.recipes.recipe import Recipe, Track
from qad.untrusted import is_number


class Tracker:
    """Logs to an open run of `library`; to nothing where it is None."""

    def __init__(self, library: Any = None) -> None:
        self._library = library

    def log(self, prefix: str, values: Mapping[str, object]) -> None:
        """Finite numbers under `prefix/name`; everything else is left out."""
        numbers = {f"{prefix}/{name}": value for name, value in values.items() if is_number(value)}
        if numbers:
            self._call("log", numbers)

    def finish(self) -> None:
        self._call("finish")

    def _call(self, name: str, *arguments: Any) -> None:
        if self._library is None:
            return
        try:
            getattr(self._library, name)(*arguments)
        except Exception as error:  # a tracker's trouble, such as no network, never ends a training
            library, self._library = self._library, None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"{library.__name__} failed ({reason}): nothing more is tracked in this run", stacklevel=3)


def require_tracker(track: Track | None) -> None:
    """Raises UsageError where the recipe names a library that is not installed."""
    if track is not None and importlib.util.find_spec(track.to) is None:
        raise UsageError(f"track.to is {track.to}, which is not installed: pip install {track.to}, or --set track=null")


@contextlib.contextmanager
def tracking(recipe: Recipe, name: str) -> Iterator[Tracker]:
    """One run named `name` with the recipe as its config, finished at the end. Raises UsageError as `require_tracker`."""
    require_tracker(recipe.track)
    if recipe.track is None:
        yield Tracker()
        return
    library = importlib.import_module(recipe.track.to)
    library.init(project=recipe.track.project, name=name, config=recipe.model_dump(mode="json"))
    tracker = Tracker(library)
    try:
        yield tracker
    finally:
        tracker.finish()
