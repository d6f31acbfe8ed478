"""A suite: which tasks are run, and everything of the protocol that decides a score. YAML, shipped by name or one's own.

    name: mine
    about: one sentence
    chat_template: false               # prompts are wrapped by the model's own template
    think_end: "</think>"              # reasoning models: what ends the thinking; only what follows is scored
    tasks:
      - task: aime25                   # a task of this tool, of the suite's folder, or of lm-eval
        n_shot: 0                      # none: the task's own
        repeats: 64                    # answers a question, each with a seed of its own
        seed: 0                        # sample r is drawn with seed + r
        generation: {temperature: 0.6, top_p: 0.95, max_gen_toks: 32768}
        items: 30                      # how many the whole task has: a different number is refused
        as_one: false                  # a group of tasks counts as one benchmark
        needs: what has to be there    # said where the task cannot be loaded

Task files in the folder `tasks` beside a suite's file are known to it; relative data files in them are looked for beside the
task file, then in the folder that is given as data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pydantic

from qad.errors import DataError
from qad.recipes.strict_yaml import Strict, first_fault, read_shipped

SHIPPED = Path(__file__).parents[1] / "suites"

Count = Annotated[int, pydantic.Field(ge=1)]
Unsigned = Annotated[int, pydantic.Field(ge=0)]
Share = Annotated[float, pydantic.Field(gt=0, le=1)]


class Generation(Strict):
    """What overrides the task's own generation settings; None leaves the task's. until: stop strings."""

    temperature: Annotated[float, pydantic.Field(ge=0)] | None = None
    top_p: Share | None = None
    top_k: Unsigned | None = None
    min_p: Annotated[float, pydantic.Field(ge=0, le=1)] | None = None
    max_gen_toks: Count | None = None
    until: list[str] | None = None

    @property
    def given(self) -> dict[str, object]:
        """Settings that are given, under lm-eval's names."""
        found = self.model_dump(exclude_none=True)
        if "temperature" in found:
            found["do_sample"] = found["temperature"] > 0
        return found


class SuiteTask(Strict):
    """One task of a suite; fields as above. limit: only so many items, for smoke runs."""

    task: str
    n_shot: Unsigned | None = None
    limit: Count | None = None
    repeats: Count | None = None
    seed: Unsigned = 0
    generation: Generation = Generation()
    items: Count | None = None
    as_one: bool = False
    needs: str = ""


class Suite(Strict):
    name: str
    about: str = ""
    chat_template: bool = False
    think_end: Annotated[str, pydantic.Field(min_length=1)] | None = None
    tasks: Annotated[list[SuiteTask], pydantic.Field(min_length=1)]

    @pydantic.model_validator(mode="after")
    def _each_task_once(self) -> Suite:
        names = [task.task for task in self.tasks]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"task {twice} stands in it twice")
        return self

    @property
    def names(self) -> list[str]:
        return [task.task for task in self.tasks]

    def limited(self, limit: int | None) -> Suite:
        """The same with at most `limit` items a task; None changes nothing."""
        if limit is None:
            return self
        tasks = [t.model_copy(update={"limit": min(limit, t.limit or limit)}) for t in self.tasks]
        return self.model_copy(update={"tasks": tasks})

    def reseeded(self, seed: int) -> Suite:
        """The same with `seed` added to every task's: other samples of the same protocol."""
        tasks = [t.model_copy(update={"seed": t.seed + seed}) for t in self.tasks]
        return self.model_copy(update={"tasks": tasks})


def of_tasks(tasks: list[str], limit: int | None = None, n_shot: int | None = None, think_end: str | None = None) -> Suite:
    """A suite of tasks under their own settings. Raises DataError for none, or one that is named twice."""
    if not tasks:
        raise DataError("no tasks given: name some, such as qad_facts, or a suite")
    try:
        return Suite(name="tasks", tasks=[SuiteTask(task=t, limit=limit, n_shot=n_shot) for t in tasks], think_end=think_end)
    except pydantic.ValidationError as error:
        raise DataError(f"tasks {', '.join(tasks)}: {first_fault(error, 'the list')}") from error


def load_suite(name: str) -> tuple[Suite, Path]:
    """A YAML file, or a shipped suite by name, and the folder of its task files (which need not exist).

    Raises UsageError, in one line, for anything else.
    """
    suite, path = read_shipped(Suite, name, SHIPPED, "suite", "suites", "; its keys are described in harness/accuracy/suite.py")
    return suite, path.parent / "tasks"
