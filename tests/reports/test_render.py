"""The rendered report: the same bytes every time, everything escaped, every number with unit and n, nothing invented."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.compare.gate import judge
from harness.compare.policy import DEFAULT, load_policy
from harness.compare.recovery import compare
from harness.records.comparison import Band, NoiseFloor
from harness.records.record import AccuracyData, FidelityData, Record, ThroughputData
from reports.figures.charts import noise_bands
from reports.render import render
from reports.sections.tables import summary, summary_text

HOSTILE = '<script>alert(1)</script> "\'>&amp; $x^2$ \u202egnp\u202c \x00\x07\ud800 | `a` ]]> --> id="q" #010101 *b* _c_ '
SECTIONS = [
    "summary",
    "benchmarks",
    "fidelity",
    "training",
    "memory",
    "speed",
    "parity",
    "checked",
    "missing",
    "recipe",
    "method",
    "provenance",
]


class Page(HTMLParser):
    """Tags, identifiers, and the text that a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self._hidden = 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._hidden += tag == "style"
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag == "style"

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data


def rendered(run: Path, records: list[Record]) -> tuple[str, str, dict[str, Any]]:
    comparison = compare(records)
    verdict = judge(comparison, load_policy(DEFAULT)) if set(comparison.arms) - {"bf16"} else None
    html, md, raw = (path.read_text(encoding="utf-8") for path in render(run, comparison, records, verdict)[:3])
    return html, md, json.loads(raw)


def only_accuracy(record: Record, change: Callable[[Any], Any]) -> Record:
    """A record whose first task is changed."""
    if not isinstance(record.data, AccuracyData):
        return record
    first, *rest = record.data.tasks
    return dataclasses.replace(record, data=AccuracyData([change(first), *rest]))


# --- a pure function -----------------------------------------------------------------------------


@pytest.mark.usefixtures("drawn")
def test_two_renders_give_the_same_bytes(run: Path, records: list[Record]) -> None:
    paths = render(run, compare(records), records)
    assert [path.name for path in paths[:3]] == ["report.html", "report.md", "report.json"]
    first = [path.read_bytes() for path in paths]
    again = render(run, compare(records[::-1]), records[::-1])
    assert [path.read_bytes() for path in again] == first
    assert sorted(path.name for path in (run / "report").iterdir()) == ["report.html", "report.json", "report.md", "tables"]
    assert not list(run.rglob("*.partial"))


def test_the_place_of_the_run_is_not_in_it(run: Path, records: list[Record]) -> None:
    for path in render(run, compare(records), records):
        assert str(run.parent).encode() not in path.read_bytes()


def test_reports_import_records_and_comparison_only() -> None:
    """No torch, and of our own packages nothing but the records, what sums them up, the comparison's types, and how JSON is
    read."""
    code = (
        "import sys, reports.render, reports.load, reports.sections.tables\n"
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'qad', 'export', 'harness',"
        " 'numpy.random.torch', 'scipy', 'lm_eval')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "harness",
        "harness.records",
        "harness.records.comparison",
        "harness.records.fidelity",
        "harness.records.parity",
        "harness.records.rebuild",
        "harness.records.record",
        "harness.records.serving",
        "harness.records.verdict",
        "harness.serving",
        "harness.serving.pareto",
        "harness.serving.statistics",
        "qad",
        "qad.errors",
        "qad.place",
        "qad.untrusted",
        "qad.untrusted.yaml_text",
        "qad.version",
    ]


# --- the page ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("drawn")
def test_the_page_is_self_contained(run: Path, records: list[Record]) -> None:
    html, _, _ = rendered(run, records)
    page = Page(html)
    assert len(html.encode()) < 1_000_000
    assert not {"script", "img", "link", "iframe", "object", "base"} & set(page.tags)
    assert "src" not in page.attributes
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import|javascript:", html)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)


@pytest.mark.usefixtures("drawn")
def test_everything_in_order(run: Path, records: list[Record]) -> None:
    html, md, _ = rendered(run, records)
    places = [html.index(f'<h2 id="{name}"') for name in SECTIONS]
    assert places == sorted(places)
    assert html.index("QAD closes") < html.index("Emulated FP4") < places[0]
    assert html.count("<svg") == 5 * 2
    assert html.count("<figure>") == 5
    assert "Median recovery against size on disk. BF16: 0.269 GB; PTQ: 0.116 GB, " in html
    summary = html[places[0] : places[1]]
    assert ("emulated" in summary, "Prefill speed" in html) == (False, True)
    folded = re.findall(r'<summary><h2 id="(\w+)"', html)
    assert folded == ["speed", "items", "recipe", "glossary", "method", "provenance"]
    assert html.count(">PTQ start 0.442</text>") == html.count(">best 0.197</text>") == 2
    assert re.findall(r"^## (.*)", md, re.MULTILINE) == re.findall(r"<h2 [^>]*>(.*?)</h2>", html)


def test_the_verdict_comes_first_with_its_reason(run: Path, records: list[Record]) -> None:
    html, md, raw = rendered(run, records)
    verdict = raw["verdict"]
    assert verdict["outcome"] == "INCONCLUSIVE"
    assert "That does not decide drop-1pct: median recovery is 100.0 %" in verdict["paragraph"]
    assert html.index('<div class="verdict inconclusive"') < html.index('class="outcome"') < html.index("<h2")
    text = Page(html).text
    assert "INCONCLUSIVE for QAD by policy drop-1pct" in text
    assert f"Why. M{verdict['reason'][1:]}." in text
    assert f"Next. U{verdict['next_action'][1:]}." in text
    assert "on both sides of the limit of at least 99.0 %; given these measurements it holds with a probability of" in text
    assert verdict["next_action"].startswith("undecided: measure ")
    assert md.index("**INCONCLUSIVE for QAD by policy drop-1pct**") < md.index("QAD closes") < md.index("## Summary")
    assert "Policy drop-1pct, held against QAD" in text
    for check in verdict["checks"]:
        assert check["rule"] in text


def test_without_an_arm_there_is_no_verdict(tmp_path: Path, records: list[Record]) -> None:
    html, _, raw = rendered(tmp_path, [r for r in records if r.arm == "bf16"])
    assert raw["verdict"] is None
    assert 'class="verdict' not in html


def test_outcome_sentences(run: Path, records: list[Record]) -> None:
    comparison = compare(records)
    text = Page(rendered(run, records)[0]).text
    gap, ratio = comparison.perplexity_gap_closed, comparison.kl_ratio
    assert gap is not None
    assert gap.low is not None
    assert gap.high is not None
    assert ratio is not None
    assert f"QAD closes {100 * gap.value:.1f} % ({100 * gap.low:.1f}–{100 * gap.high:.1f}) of the perplexity gap" in text
    assert f"lowers the KL divergence to the BF16 teacher to {100 * ratio.value:.1f} %" in text
    assert "Median recovery of BF16's score over 2 benchmarks: QAD 100.0 % (97.1–103.0), worst qad_facts 99.5 %" in text
    assert "So few benchmarks say little about others." in text
    assert "The NVFP4 checkpoint is 0.116 GB on disk, 43.3 % of the BF16 checkpoint's 0.269 GB." in text


def test_every_number_has_a_unit_and_an_n(records: list[Record]) -> None:
    comparison = compare(records)
    table = summary(comparison, records)
    assert table.columns == ["", "BF16", "PTQ", "QAD", "n"]
    unit = re.compile(r"^(—|[−+]?[\d.,e+−]+ (%|nats|GB|bits|tokens/s|×|points)|[\d.,]+)$")
    for row in (row for group in table.groups for row in group.rows):
        *numbers, n = row.cells
        assert len(numbers) == 3
        assert re.fullmatch(r"[\d,]+ (items?|benchmarks?|sequences?|repeats?|pairs?)|exact", n.text), row
        for cell in numbers:
            assert unit.match(cell.text), row
            assert (
                cell.text == "—"
                or row.label == "Perplexity"
                or cell.text.split()[-1] in ["%", "nats", "GB", "bits", "tokens/s", "×", "points"]
            )
            if row.label in ("KL divergence", "↳ recovery", "Median recovery", "Worst benchmark") and cell.text != "—":
                assert re.search(r"\d–\d|the teacher itself", cell.detail), row


def test_size_labels_match_their_divisors(run: Path, records: list[Record]) -> None:
    text = re.sub(r"\s+", " ", Page(rendered(run, records)[0]).text)
    assert "0.269 GB 0.251 GiB" in text.replace("GB0", "GB 0")
    assert "BF16, GB PTQ, GB QAD, GB" in text
    assert "GB is 10⁹ bytes; exact" in text


def test_the_best_validation_and_the_start_are_marked(run: Path, records: list[Record]) -> None:
    _, md, _ = rendered(run, records)
    assert re.search(r"\| Step 40 \| 40,960 \| 0\.197 \*best\*", md)
    assert re.search(r"\| Step 0 \| 0 \| 0\.442 \*PTQ start\*", md)


def test_provenance(run: Path, records: list[Record]) -> None:
    text = Page(rendered(run, records)[0]).text
    for part in (
        "8d1f0c2b7e5a4c3d9b8a7f6e5d4c3b2a19081726 with uncommitted changes",
        "torch 2.13.0",
        "Example 3 GHz",
        "arms/qad",
        "qad" * 21 + "q",
        "exclude: [lm_head]",
        "2026-01-15",
    ):
        assert part in text


def test_json_keeps_every_digit(run: Path, records: list[Record]) -> None:
    comparison = compare(records)
    _, _, raw = rendered(run, records)
    assert raw["comparison"]["fidelity"]["qad"]["kl"]["value"] == comparison.fidelity["qad"].kl.value
    assert raw["memory"]["qad"]["data"]["bytes_by_class"]["fp4_codes"] == 53_084_160
    assert len(raw["training"]) == 51
    assert len(raw["records"]) == 12
    assert len({record["sha256"] for record in raw["records"]}) == 12


def test_markdown_tables_are_rectangular(run: Path, records: list[Record]) -> None:
    _, md, _ = rendered(run, records)
    tables = re.findall(r"(?:^\|.*\n)+", md, re.MULTILINE)
    assert len(tables) == 15
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_the_terminal_says_the_same(records: list[Record]) -> None:
    text = summary_text(compare(records), records)
    assert "Median recovery (over benchmarks)" in text
    assert "99.5 % (95.3–103.7, qad_facts)" in text
    assert "speed is not FP4 speed" in text
    assert max(map(len, text.splitlines())) < 190


# --- emulation -----------------------------------------------------------------------------------


def test_emulated_numbers_are_marked(run: Path, records: list[Record]) -> None:
    html, md, _ = rendered(run, records)
    assert "PTQ and QAD ran with NVFP4 values but without FP4 arithmetic" in html
    assert "their accuracy is meaningful, their speed is not FP4 speed" in html
    assert re.search(r"288 tokens/s \(range 286–293\) \*emulated\*", md)


def test_native_numbers_are_not(run: Path, records: list[Record]) -> None:
    native = [dataclasses.replace(r, engine=dataclasses.replace(r.engine, emulated=False)) for r in records]
    html, _, _ = rendered(run, native)
    assert "emulated" not in Page(html).text.lower()


# --- what is missing, doubtful or bad ------------------------------------------------------------


def test_missing_records_are_shown_as_not_measured(run: Path, records: list[Record]) -> None:
    kept = [r for r in records if (r.arm, r.kind) not in {("qad", "fidelity"), ("ptq", "memory"), ("qad", "accuracy")}]
    html, md, _ = rendered(run, kept)
    assert "| KL divergence (nats per token) | 0 nats (the teacher itself) | 0.386 nats (0.337–0.430) | not measured |" in md
    assert "| On disk (weight files) | 0.269 GB (0.251 GiB) | not measured | 0.116 GB" in md
    assert "- **Fidelity of qad**: not measured: there is no record" in md
    assert "QAD closes" not in html
    assert "Left out" in html


@pytest.mark.parametrize("kept", [[], ["memory"], ["throughput"], ["fidelity"], ["accuracy"]])
def test_a_run_with_little_in_it(tmp_path: Path, records: list[Record], kept: list[str]) -> None:
    some = [r for r in records if r.kind in kept]
    html, md, raw = rendered(tmp_path, some)
    assert "was not measured; see" in html
    assert "The run folder holds no recipe." in md
    absent = {
        f"{kind} of {arm}".capitalize()
        for kind in ("accuracy", "fidelity", "memory", "throughput")
        if kind not in kept
        for arm in ("bf16", "ptq", "qad")
    }
    listed = {entry["what"] for entry in raw["not_measured"]}
    assert listed >= {*absent, "Training curve", "Recipe", "Noise floor", "Memory while serving", "Stages of the run"}


def test_gap_closed_is_not_available_without_a_gap(run: Path, records: list[Record]) -> None:
    """PTQ as good as its teacher: no gap, no share of it."""

    def level(record: Record) -> Record:
        if record.arm != "ptq" or not isinstance(record.data, FidelityData):
            return record
        sequences = [
            dataclasses.replace(s, nll_student_sum=s.nll_teacher_sum + (-1) ** i * 9) for i, s in enumerate(record.data.sequences)
        ]
        return dataclasses.replace(record, data=dataclasses.replace(record.data, sequences=sequences))

    html, md, raw = rendered(run, [level(record) for record in records])
    assert raw["comparison"]["perplexity_gap_closed"] is None
    assert "perplexity gap that PTQ opens" not in html
    assert "perplexity gap closed is n/a: the interval of the gap" in md


def test_a_collapsed_benchmark_turns_the_page_red(run: Path, records: list[Record]) -> None:
    """The median of QAD is fine, one task fell to a third."""

    def collapse(task: Any) -> Any:
        return dataclasses.replace(
            task, items=[dataclasses.replace(item, score=item.score * (i % 3 == 0)) for i, item in enumerate(task.items)]
        )

    changed = [only_accuracy(r, collapse) if r.arm == "qad" else r for r in records]
    html, _, raw = rendered(run, changed)
    banner = raw["banners"][0]
    assert banner["level"] == "warning"
    assert re.search(r"QAD recovers only 3\d\.\d % .* on qad_agreement", banner["text"])
    assert 'class="banner warning"' in html
    for sentence in raw["outcome"]:
        assert ("Median recovery" in sentence) == ("worst" in sentence)


def test_no_warning_on_a_good_run(run: Path, records: list[Record]) -> None:
    _, _, raw = rendered(run, [r for r in records if r.arm != "ptq"])
    assert [banner["level"] for banner in raw["banners"]] == ["caution"]


def test_training_that_ended_above_its_start_is_a_warning(run: Path, records: list[Record]) -> None:
    lines = [{"step": s, "tokens": s, "kl": 0.5, "val_kl": 0.4 + 0.01 * s} for s in range(3)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    _, _, raw = rendered(run, records)
    assert "Validation KL ended at 0.420 nats per token, above the 0.400 of PTQ" in raw["banners"][0]["text"]


def test_a_limited_run_is_called_a_smoke_run(run: Path, records: list[Record]) -> None:
    changed = [only_accuracy(r, lambda task: dataclasses.replace(task, limit=300)) for r in records]
    html, md, _ = rendered(run, changed)
    assert "Smoke run" in html
    assert "| qad\\_agreement (acc, 0-shot, smoke) |" in md


def test_differences_inside_noise_are_called_so(run: Path, records: list[Record]) -> None:
    _, md, _ = rendered(run, records)
    assert re.search(r"\| PTQ \| 93\.6 % \(86\.7–100\.5\) \| within noise of BF16", md)
    assert "Within noise means that the interval holds 100 %, not that the arms are equal." in md


@pytest.mark.usefixtures("drawn")
def test_the_noise_floor_is_a_band_behind_the_dots(run: Path, records: list[Record]) -> None:
    comparison = compare(records)
    band, wide = Band(0.99, 1.01), Band(0.97, 1.03)
    floors = {
        arm: NoiseFloor(arm, {"batch_size": 7}, median, {"qad_facts": median}, comparison.kl_ratio, None, None)
        for arm, median in (("bf16", band), ("ptq", wide))
    }
    found = dataclasses.replace(comparison, noise_floor=floors)
    assert noise_bands(found) == {"qad_facts": wide, "Median": wide}
    html, md, raw = (path.read_text(encoding="utf-8") for path in render(run, found, records)[:3])
    assert html.count(">noise floor</text>") == 2
    assert "| PTQ (batch\\_size 7) | 97.0 % to 103.0 % | 45.9 %" in md
    assert "no arm was run against itself" not in md
    assert json.loads(raw)["comparison"]["noise_floor"]["ptq"]["median"] == {"low": 0.97, "high": 1.03}
    plain = render(run, comparison, records)[0].read_text(encoding="utf-8")
    assert "noise floor</text>" not in plain
    assert "no arm was run against itself" in plain


def test_the_curve_of_another_trained_arm_is_beside_qads(run: Path, records: list[Record]) -> None:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").replace("0.442", "0.5")
    (run / "metrics-qat.jsonl").write_text(lines, encoding="utf-8")
    raw = rendered(run, records)[2]
    assert [step["step"] for step in raw["training_of"]["qat"]] == list(range(51))
    assert raw["training_of"]["qat"][0]["val_kl"] == 0.5
    assert raw["training"][0]["val_kl"] == 0.442


def test_two_filters_are_both_named(run: Path, records: list[Record]) -> None:
    def two(record: Record) -> Record:
        if not isinstance(record.data, AccuracyData):
            return record
        task = record.data.tasks[0]
        return dataclasses.replace(
            record, data=AccuracyData([dataclasses.replace(task, filter=f) for f in ("strict", "flexible")])
        )

    _, md, _ = rendered(run, [two(record) for record in records])
    assert "(acc, 0-shot, filter strict)" in md
    assert "(acc, 0-shot, filter flexible)" in md
    assert "shown but not in the median" in md


def test_zero_baseline_is_shown_as_not_available(run: Path, records: list[Record]) -> None:
    def zero(task: Any) -> Any:
        return dataclasses.replace(task, items=[dataclasses.replace(item, score=0.0) for item in task.items])

    changed = [only_accuracy(r, zero) if r.arm == "bf16" else r for r in records]
    _, md, _ = rendered(run, changed)
    assert "| ↳ recovery | — | n/a | n/a | 300 items (30 clusters) |" in md
    assert "bf16 scores 0" in md
    assert "1 of 2 benchmarks are n/a, left out" in md


# --- hostile text --------------------------------------------------------------------------------


def hostile(record: Record) -> Record:
    data: Any = record.data
    if isinstance(data, AccuracyData):
        tasks = [dataclasses.replace(t, task=HOSTILE + t.task, metric=HOSTILE, filter=HOSTILE) for t in data.tasks]
        data = AccuracyData([*tasks, dataclasses.replace(data.tasks[0], task="W" * 10_000)])
    elif isinstance(data, ThroughputData):
        data = ThroughputData([dataclasses.replace(p, phase=HOSTILE + p.phase) for p in data.points])
    elif not isinstance(data, FidelityData):
        data = dataclasses.replace(data, bytes_by_class={**data.bytes_by_class, HOSTILE: 0})
    engine = dataclasses.replace(record.engine, name=HOSTILE, device=HOSTILE * 100, kernel_path=HOSTILE * 100)
    provenance = {
        "producer": {"name": HOSTILE, "commit": HOSTILE * 99},
        "argv": [HOSTILE] * 99,
        "environment": {"cpu": HOSTILE, "packages": {HOSTILE: HOSTILE}, "gpus": [HOSTILE]},
    }
    return dataclasses.replace(
        record,
        arm=record.arm if record.arm in ("bf16", "ptq") else HOSTILE,
        model=HOSTILE * 200,
        data=data,
        engine=engine,
        provenance=provenance,
        created=HOSTILE,
        checkpoint=HOSTILE + record.arm,
    )


@pytest.mark.usefixtures("drawn")
def test_hostile_text_is_text(run: Path, records: list[Record]) -> None:
    (run / "recipe.yaml").write_text("```\n</code><script>\n~~~\n", encoding="utf-8")
    plain = Page(rendered(run, records)[0])
    html, md, raw = rendered(run, [hostile(record) for record in records])
    page = Page(html)
    assert raw["verdict"]["arm"] == HOSTILE or raw["verdict"]["arm"] == "ptq"
    assert set(page.tags) <= set(plain.tags)
    assert page.attributes <= plain.attributes
    assert len(page.ids) == len(set(page.ids))
    assert "<script>alert(1)</script> \"'>&amp; $x^2$ �gnp� ���" in page.text
    assert len(html.encode()) < 1_000_000
    for text in (html, md):
        assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    outside = re.sub(r"(?ms)^(`{3,})yaml$.*?^\1$", "", md)
    assert "<" not in outside
    assert not re.search(r"(?<!\\)`", outside)
    assert raw["title"].startswith("<script>")


def test_hostile_samples_are_text(run: Path, records: list[Record], keep_samples: Callable[..., None]) -> None:
    """What a model was asked and said: scripts, control characters, right-to-left text, lines of 10 KB."""
    keep_samples(run, records, "What is {0}?")
    plain = Page(rendered(run, records)[0])
    said = HOSTILE.replace("\ud800", "") + "\n| a | b |\n---\n\u05e9\u05dc\u05d5\u05dd\r\n" + "W" * 10_000 + " {0}"
    keep_samples(run, records, said)
    html, md, _ = rendered(run, records)
    page = Page(html)
    assert (page.tags, page.attributes, page.ids) == (plain.tags, plain.attributes, plain.ids)
    assert page.text.count("<script>alert(1)</script>") > 12
    assert "\u05e9\u05dc\u05d5\u05dd" in page.text
    assert len(html.encode()) < 1_000_000
    for text in (html, md):
        assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    outside = re.sub(r"(?ms)^(`{3,})yaml$.*?^\1$", "", md)
    assert "<" not in outside
    headings = re.findall(r"^#+ .*", md, re.MULTILINE)
    assert len(headings) == len(re.findall(r"<h[123]", html))


def test_markdown_of_hostile_text_keeps_its_tables(run: Path, records: list[Record]) -> None:
    _, md, _ = rendered(run, [hostile(record) for record in records])
    for table in re.findall(r"(?:^\|.*\n)+", md, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
