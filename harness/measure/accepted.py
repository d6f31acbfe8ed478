"""Records that were measured elsewhere and copied into a run: accepted by the hash of what was measured.

    qad measure KIND RUN/export/qad --arm qad --out qad/KIND.json      on the machine with the GPU
    copy qad/KIND.json into RUN/measure/qad/, then qad report RUN      here

A record names the weights it was made of. They are the run's own, or its report refuses the record.
"""

from __future__ import annotations

from pathlib import Path

from harness.records import record as records
from qad.artifact import MANIFEST, open_artifact
from qad.errors import ArtifactError


def require_own(run: Path) -> None:
    """Hold the records of RUN/measure against the folders of the run; an arm's controls are in ARM-again. Scores that were
    imported have no weights to compare, an arm whose folder was removed cannot be compared, and a file that is no record is the
    report's to name.

    Raises ArtifactError naming the record, what differs, and the remedy.
    """
    for path in sorted((run / "measure").glob("*/*.json")):
        try:
            record = records.read(path)
        except (ValueError, OSError):
            continue
        arm = path.parent.name if record.control is None else path.parent.name.removesuffix("-again")
        if record.arm != arm:
            raise ArtifactError(f"{path} was measured as arm {record.arm!r}: measure it with --arm {arm}, or move it")
        if "imported" not in record.provenance:
            _require_weights(run, arm, path, record.checkpoint)


def _require_weights(run: Path, arm: str, path: Path, checkpoint: str) -> None:
    """A measurement names its weights by the digest of the run's folder, so that has to be copied with its manifest."""
    folder = run / "arms" / "bf16" if arm == "bf16" else run / "export" / arm
    if not (folder / MANIFEST).is_file():
        return
    artifact = open_artifact(folder)
    own = str(artifact.manifest["inputs"]["source"]) if arm == "bf16" else artifact.digest
    if checkpoint != own:
        raise ArtifactError(
            f"{path} is of other weights ({checkpoint[:12]}) than the run's arm {arm} ({own[:12]}): measure "
            f"{'the source' if arm == 'bf16' else f'{folder}, copied with its {MANIFEST},'} again, or remove the record"
        )
