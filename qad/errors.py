"""The exceptions a user can meet. Each message says what is wrong, what was given, and the remedy; the command
prints it as one line and exits with the class's code. Everything else that escapes is a defect."""

from __future__ import annotations


class QadError(Exception):
    """Base of all errors meant for the user."""

    exit_code = 2


class UsageError(QadError):
    """The command line, the recipe or a path is wrong: nothing has been computed."""


class SourceError(QadError):
    """The model to start from cannot be used: files missing, not a causal LM, already quantized, NaN weights."""


class DataError(QadError):
    """Text or tasks cannot serve their purpose: empty, too short, splits that overlap."""


class ArtifactError(QadError):
    """A folder of an earlier stage is missing, unfinished, changed since it was written, or another run's."""


class TrainingError(QadError):
    """A training cannot go on: its numbers are no numbers any more. The last good state is kept."""


class BrokenCheckpointError(QadError):
    """A checkpoint is broken: the negative verdict of `qad check`."""

    exit_code = 1


class EngineError(QadError):
    """A serving engine did not start, ended early, or does not answer."""


class StorageError(QadError):
    """Writing failed (disk full, read-only). What was written so far is kept aside and continues next time."""


class LoadToolError(QadError):
    """A tool that makes load for a server could not be run to its end."""
