"""What small instances of a job's models say before hours are spent: whether packed documents stay apart, and which selected
modules no text ever reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qad.arms.selection import Selection
from qad.errors import UsageError
from qad.model.families import TRIED, family_name
from qad.model.isolation import Isolation, kind_of, probe
from qad.model.names import names_of


def one_document_a_row(
    model: Any, selection: Selection, teacher: Any | None, say: Callable[[str], None] = lambda line: None
) -> bool:
    """Whether windows hold one document each, because a model is not known to keep packed ones apart. model, teacher: skeletons;
    teacher is None where it is the model itself.

    Raises UsageError for a model whose tokens see later ones, so that padding would change them, and for modules whose
    inputs calibration would never see.
    """
    found = probe(model.config)
    _require_reached(model, selection, found)
    others = {"the teacher": probe(teacher.config)} if teacher is not None else {}
    for called, each in {"the model": found, **others}.items():
        if not each.causal:
            raise UsageError(
                f"{called} is not causal (a token's hidden state changes by {each.followed:.1g} with what follows it): start "
                "from a model of the next token"
            )
        say(f"       {_told(called, each)}")
    if family_name(model.config) not in TRIED:
        checks = "1 check passed" if found.packed is None else "3 checks passed (it runs, is causal, reaches what is selected)"
        proved = "proved" if found.proved else "not proved"
        say(f"       untried: nobody has taken a {family_name(model.config)} the whole way here; {checks}, packing {proved}")
    return not all(each.proved for each in (found, *others.values()))


def _told(called: str, found: Isolation) -> str:
    if found.proved:
        return f"{called} keeps documents of a row apart (difference {found.packed:.0e} on a small instance)"
    why = f"it could not be asked ({found.why_not})" if found.packed is None else f"difference {found.packed:.1g}"
    return f"{called} does not keep documents of a row apart, {why}: one document a row, and padding counts nowhere"


def _require_reached(model: Any, selection: Selection, found: Isolation) -> None:
    names = names_of(model)
    never = [m for m in selection.with_input_scale if kind_of(names.inner(m)) in found.unreached]
    if never:
        raise UsageError(
            f"calibration would never reach {never[0]} ({len(never)} modules), text alone does not run it: put it into "
            "quantize.exclude, or give it a format for weights alone (quantize.formats)"
        )
