"""What the commands do, for Python: `import qad; qad.run(...)`. The command line calls these very functions.

Each imports what it needs when it is called, so that the command line starts without torch. What a user did wrong is a
`qad.errors.QadError` with the remedy in its message. `say` is given every line that the command would print.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qad.errors import UsageError
from qad.place import place_of, require_apart
from qad.untrusted import mapping, strict_json

if TYPE_CHECKING:
    import pandas as pd

    from export.rules.findings import Finding
    from harness.records.comparison import Comparison
    from harness.records.verdict import Verdict
    from qad.recipes.recipe import Measure, Recipe

    Place = str | Path
    Say = Callable[[str], None]


def _table(name: str, text: str) -> property:
    def read(results: Results) -> pd.DataFrame:
        import pandas as pd

        path = results.folder / "report" / "tables" / f"{name}.parquet"
        if not path.is_file():
            raise UsageError(f"there is no {path}: `qad report {results.folder}` renders it from the records")
        return pd.read_parquet(path)

    return property(read, doc=text)


@dataclasses.dataclass(frozen=True)
class Results:
    """What a folder of `run`, `validate` or `compare` found, read when asked for. The tables are those of RUN/report/tables.

    folder: RUN, or the folder of a comparison.
    """

    folder: Path

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.folder / "report" / "report.html"

    @property
    def verdict(self) -> Verdict | None:
        """By the report's policy; None where nothing but the baseline was measured."""
        from harness.records.rebuild import build
        from harness.records.verdict import Verdict

        raw = self._contents.get("verdict")
        return None if raw is None else build(Verdict, raw, "verdict")

    @property
    def comparison(self) -> Comparison:
        """Every number with its interval, as typed data."""
        from harness.records.comparison import from_json

        return from_json(self._contents["comparison"])

    estimates = _table("estimates", "Every number with its interval, one a row.")
    items = _table("items", "Every question, an arm's score beside BF16's.")
    memory = _table("memory", "Bytes on disk by class.")
    throughput = _table("throughput", "Tokens a second, every repeat.")
    parity = _table("parity", "An engine beside the torch reference, a row a prompt and a row a Linear.")
    training = _table("training", "The lines of metrics.jsonl.")

    @functools.cached_property
    def _contents(self) -> dict[str, Any]:
        path = self.folder / "report" / "report.json"
        try:
            return mapping(strict_json(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read ({error}): `qad report {self.folder}` renders it again") from error


def load_recipe(recipe: Place, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe by path or shipped name, with overrides such as "train.lr=1e-5". Raises UsageError, one line."""
    from qad.recipes.load import load_recipe

    return load_recipe(str(recipe), overrides)


def plan(
    recipe: Recipe | Place, *, gpu: str | None = None, gpus: int = 1, say: Say = print, trust_remote_code: bool = False
) -> None:
    """Say what a recipe would do. Raises QadError where `run` could not finish it.

    gpu, gpus: the machine it will run on, such as "h200"; None: this one.
    trust_remote_code: run the *.py files that a model folder brings along.
    """
    from qad.command.planning.plan import plan

    with _code(trust_remote_code):
        plan(_recipe(recipe), say, gpu, gpus)


def run(recipe: Recipe | Place, out: Place, *, redo: bool = False, say: Say = print, trust_remote_code: bool = False) -> Results:
    """Everything: calibrate, train, export, check, measure, report. Finished stages in `out` are reused. Raises QadError.

    redo: make trained arms again that the recipe would make otherwise.
    """
    from qad.command.inputs_and_outputs import models
    from qad.command.run import run

    asked, place = _recipe(recipe), place_of(Path(out))
    require_apart(place, models(asked))
    with _code(trust_remote_code):
        run(asked, place, say, redo)
    return Results(place)


def check(folder: Place, *, source: Place | None = None, tp: int = 1, engine: str = "all") -> list[Finding]:
    """All findings on a quantized folder, errors first; none: nothing is wrong. Raises UsageError for what is no such folder.

    source: arm it was exported from, to compare decoded weights.
    tp: planned tensor parallelism.
    engine: whose rules: vllm, trtllm or all.
    """
    from export.check import check

    return check(Path(folder), Path(source) if source is not None else None, tp, engine)


def validate(
    folders: Mapping[str, Place],
    out: Place,
    *,
    measure: Measure | Mapping[str, Any] | None = None,
    policy: str = "drop-1pct",
    dtype: str = "auto",
    seed: int = 0,
    say: Say = print,
    trust_remote_code: bool = False,
) -> Results:
    """Check, measure and judge folders that any tool made. Raises QadError; BrokenCheckpointError names the broken ones.

    folders: arm -> checkpoint folder; bf16, the original, is among them.
    measure: as that section of a recipe; None: memory, fidelity, accuracy, and speed where an engine computes natively.
    policy: name or YAML file of what the numbers are held against.
    """
    from qad.command.validate import Validation, asked_measure, validate

    named = {arm: Path(folder) for arm, folder in folders.items()}
    place = place_of(Path(out))
    with _code(trust_remote_code):
        validate(Validation(named, asked_measure(measure), policy, dtype, seed), place, say)
    return Results(place)


def compare(
    arms: Mapping[str, Place] | Sequence[Place],
    out: Place,
    *,
    margin: float = 0.01,
    policy: str = "drop-1pct",
    noise_floor: Sequence[Place] = (),
    say: Say = print,
) -> Results:
    """Compare measured or imported arms, baseline first. Raises UsageError, DataError where they are not comparable.

    arms: arm -> records (RUN/measure/bf16 or one file), CSV file, result folder of lm-eval or NeMo Evaluator.
    margin: share of a score that may be lost.
    noise_floor: controls made by qad measure --noise-floor.
    """
    from qad.command.compare import compare_arms

    given = [f"{arm}={path}" for arm, path in arms.items()] if isinstance(arms, Mapping) else [str(path) for path in arms]
    place, controls = place_of(Path(out)), [Path(path) for path in noise_floor]
    read = [*controls, *(Path(path) for path in (arms.values() if isinstance(arms, Mapping) else ()))]
    for path in read:
        require_apart(place, {"measurement": path})
    artifact, text = compare_arms(given, place, margin=margin, policy=policy, noise_floor=controls)
    say(f"{text}\n\ncomparison: {artifact.path}")
    return Results(artifact.path)


def gate(results: Results | Place, policy: str = "drop-1pct", arm: str | None = None) -> Verdict:
    """Hold results against a policy: a run, a comparison, or report.json. Raises UsageError for anything else.

    arm: to judge; None: qad, else ptq.
    """
    from qad.command.compare import gate

    return gate(results.folder if isinstance(results, Results) else Path(results), policy, arm)


def _recipe(recipe: Recipe | Place) -> Recipe:
    return load_recipe(recipe) if isinstance(recipe, (str, Path)) else recipe


def _code(trusted: bool) -> AbstractContextManager[None]:
    """Once trusted, by the command line, a folder's code stays so."""
    from qad.model.loader import code_is_trusted, remote_code

    return remote_code(trusted or code_is_trusted())
