"""A report's contents, in order, from a comparison, its records and the run folder; format comes later."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

from collections.abc import Iterator

from harness.records.comparison import Comparison
from harness.records.record import ARMS, Record
from harness.records.verdict import Verdict
from qad.untrusted import clean
from reports.figures import charts as figures
from reports.figures import pareto
from reports.figures.size import accuracy_against_size
from reports.load import Run
from reports.numbers import people_list
from reports.parts import Block, Code, Document, Notes, Section, Text
from reports.sections import capacity, checked, details, origin, search, seeds, serving, strata, tables
from reports.sections import engine_parity as parity
from reports.sections.missing import merged
from reports.sections.outcome import QAD, arm_name, banners, decision, memory_of, outcome, tiles

RECIPE_LIMIT = 100_000
EVERY_ITEM = Text("Every item, with its hashes and scores, is in tables/items.parquet and tables/items.csv.")

GLOSSARY = [
    (
        "Arm",
        "One treatment of the model. BF16 is the original; PTQ was quantized without training; QAD was distilled from BF16 "
        "with quantization in the loop; QAT was trained on text.",
    ),
    ("Recovery", "What is left of BF16’s score: the arm’s score divided by BF16’s."),
    ("KL divergence", "How far the arm’s next-token distribution is from BF16’s, in nats; 0 is equal."),
    ("Policy", "The thresholds that the numbers are held against."),
    ("95 % interval", "Where the true value lies, as far as these items tell. A threshold is held against all of it."),
    ("Emulated", "NVFP4’s values computed without FP4 units: accuracy means what it says, speed does not."),
    ("W4A4, W4A16", "Weights in 4 bits, inputs in 4 or in 16."),
]

METHOD = [
    (
        "Recovery",
        "Score of the arm / score of BF16, the other way round where lower is better. n/a where BF16 scores 0 or a score is "
        "missing; n/a is left out of medians. Nothing is rounded before it is compared.",
    ),
    (
        "Pairing",
        "Items are paired by the hashes of document and prompt and have equal targets. Records made under other settings are "
        "refused.",
    ),
    (
        "Intervals",
        "95 %. Items of one template or document, and tokens of one sequence, form a cluster; variance is taken between them.",
    ),
    (
        "Of a recovery",
        "Delta method, cluster-robust, Student’s t (covers 94–97 % in simulation). Where fewer than ten items differ, Tango’s "
        "score interval of the paired difference at n divided by the design effect (94 % or more); none for scores that are not "
        "right-or-wrong.",
    ),
    ("Of a score", "Wilson’s interval at n divided by the design effect for right-or-wrong scores, cluster-robust t for others."),
    (
        "Median recovery",
        "Over benchmarks, a task’s first filter each; its interval allows benchmarks to be equal (a mixture of finite mixtures). "
        "In simulation of 11 benchmarks it covers 93–100 %, the difference of two medians too, but 70–90 % where one benchmark "
        "decides both. It is about these benchmarks, not others.",
    ),
    (
        "Training seeds",
        "Checkpoints of one recipe under several seeds are one arm: means over seeds, with what lies between seeds added to what "
        "lies between items.",
    ),
    (
        "Tests",
        "No difference: exact McNemar over items, or exact sign-flip over clusters; p adjusted by Holm. Non-inferior: the lower "
        "one-sided 95 % limit of the recovery (97.5 % where a cluster holds several answers) lies above 1 − margin. Items "
        "needed: for 80 % power without any true difference.",
    ),
    (
        "Verdict",
        "A threshold holds where the worse limit of the interval meets it, fails where the better one does not, and is "
        "inconclusive between. The probability that it holds is the normal one of the interval’s width.",
    ),
    (
        "Imported scores",
        "Unpaired. The interval comes from the printed standard error or from the number of answers, half of whose variance is "
        "taken to change between runs; else there is none.",
    ),
    (
        "KL divergence",
        "KL(BF16 ‖ arm) over the full vocabulary, a mean over tokens of a test split that nothing else saw. Top-1 agreement: "
        "both put the same token first.",
    ),
    (
        "Of a fidelity number",
        "Studentised cluster bootstrap over sequences, 4,000 resamples, widened by Student’s t; for KL on the log scale (93–97 % "
        "in simulation).",
    ),
    ("Perplexity gap closed", "(PTQ − QAD) / (PTQ − BF16), given only where the interval of the PTQ gap lies above 0."),
    ("Speed", "Repeats of the arms are interleaved; ratios are paired by repeat, with Student’s t on their logs."),
    ("Size", "From the safetensors headers, a tied tensor counted once."),
]


def document(
    run: Run,
    comparison: Comparison,
    records: list[Record],
    others: list[Record],
    verdict: Verdict | None,
    changed: list[Block],
    missing: list[tuple[str, str]],
) -> Document:
    """Everything, in the order in which it is read. `records` are in the report's order (`origin.ordered`).

    others: of further training seeds, and second measurements for the noise floor. changed: the parts on single benchmarks
    and their items (`items.on_page`). missing: what was not measured, and why (`missing.not_measured`).
    """
    base = [record for record in records if record.arm == ARMS[0]] or records  # the others may be named after a folder
    models = [clean(name) for name in dict.fromkeys(record.model for record in base)]
    dates = sorted({record.created[:10] for record in records})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "at an unknown time"
    arms = people_list([arm_name(arm) for arm in comparison.arms]) if comparison.arms else "no arm"
    sections = [
        Section("summary", "Summary", _kept(details.checks(verdict), tables.summary(comparison, records))),
        Section("benchmarks", "Recovery by benchmark", _or_nothing("Recovery", *_benchmarks(comparison))),
        Section("fidelity", "Fidelity to the BF16 teacher", _or_nothing("Fidelity", *_fidelity(run, comparison, records))),
        Section("training", "Training", _or_nothing("The training curve", *_training(run, comparison))),
        Section("memory", "Size and memory", _or_nothing("Size", *_memory(comparison, records))),
        Section("speed", "Speed", _or_nothing("Speed", *_speed(comparison, records)), folded=tables.emulated_alone(comparison)),
        Section("parity", "Parity of an engine", _or_nothing("Parity", parity.parity(records))),
        Section("checked", "What each arm was checked with", _kept(checked.checked(run, comparison, records, others))),
        Section("missing", "What was not measured, and why", [Notes(merged(missing, comparison.arms))]),
        *([Section("items", "Changed items", [*changed, EVERY_ITEM], folded=True)] if changed else []),
        Section("recipe", "Recipe and text", _recipe(run), folded=True),
        Section(
            "glossary", "Words", [Notes([word for word in GLOSSARY if word[0] != "Emulated" or comparison.emulated])], folded=True
        ),
        Section("method", "Method", [Notes(METHOD)], folded=True),
        Section("provenance", "Provenance", origin.provenance(records, others, run), folded=True),
    ]
    return Document(
        title=people_list(models) if models else "No model",
        subtitle=f"NVFP4 recovery report: {arms}, measured {clean(span, 40)}",
        decision=decision(verdict),
        tiles=tiles(comparison, records),
        plot=figures.recovery(comparison),
        outcome=outcome(comparison, records),
        banners=banners(comparison, records, run.steps),
        sections=sections,
    )


def _kept(*blocks: Block | None) -> list[Block]:
    return [block for block in blocks if block is not None]


def _or_nothing(what: str, *blocks: Block | None) -> list[Block]:
    return _kept(*blocks) or [Text(f"{what} was not measured; see “What was not measured”.")]


def _benchmarks(comparison: Comparison) -> Iterator[Block | None]:
    for part in (details.benchmarks, details.contrasts, details.noise_floor, strata.outputs):
        yield part(comparison)


def _fidelity(run: Run, comparison: Comparison, records: list[Record]) -> Iterator[Block | None]:
    yield details.qad_against_ptq(comparison)
    yield figures.fidelity(comparison, records)
    yield details.token_kl(comparison)
    yield search.searched(run)
    yield figures.strata(comparison)
    yield strata.where_it_sits(comparison)
    yield strata.kl_by_stratum(comparison)
    yield strata.continuations(comparison)


def _training(run: Run, comparison: Comparison) -> Iterator[Block | None]:
    yield figures.training(run.steps, run.other_steps)
    yield details.validation({QAD: run.steps, **run.other_steps})
    yield seeds.training_seeds(comparison)


def _memory(comparison: Comparison, records: list[Record]) -> Iterator[Block | None]:
    yield capacity.headline(comparison.arms, records)
    yield accuracy_against_size(comparison, memory_of(records))
    for part in (figures.memory, details.memory, capacity.sequences, capacity.serving):
        yield part(comparison.arms, records)


def _speed(comparison: Comparison, records: list[Record]) -> Iterator[Block | None]:
    yield details.speed(comparison, records)
    yield pareto.pareto_figure(comparison, records)
    yield serving.serving_table(comparison, records)
    yield serving.serving_notes(records)


def _recipe(run: Run) -> list[Block]:
    text = _kept(details.text(run.text))
    if not run.recipe:
        return [Text("The run folder holds no recipe."), *text]
    return [Code(clean(run.recipe.rstrip("\n"), RECIPE_LIMIT, lines=True), "yaml"), *text]
