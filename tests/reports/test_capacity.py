"""Memory beyond the files in the report: separate rows, GB and GiB, unknown said."""

from __future__ import annotations

import dataclasses

import pytest

from harness.records.record import CacheCost, EngineMemory, MemoryData, Record, SequenceMemory
from reports.load import Run
from reports.parts import Row, Table
from reports.sections import capacity, tables
from reports.sections.origin import provenance

ARMS = ["bf16", "ptq"]
BF16 = EngineMemory(
    weights_bytes=14_480_000_000,
    kv_cache_bytes=100 * 2**30,
    kv_cache_tokens=1_000_000,
    max_concurrency=30.5,
    max_model_len=32_768,
    activation_bytes=2**30,
    process_bytes=125 * 10**9,
    process_method="NVML",
)
PTQ = dataclasses.replace(
    BF16, weights_bytes=4_500_000_000, kv_cache_tokens=1_090_000, activation_bytes=None, process_bytes=125 * 10**9
)
COST = CacheCost(
    {"bf16": 131_072.0, "fp8": 65_536.0, "nvfp4": 36_864.0},
    "bf16",
    0,
    0,
    [SequenceMemory(4096, 536_870_912, 15_016_870_912), SequenceMemory(131_072, 17_179_869_184, 231_659_869_184)],
)


def served(records: list[Record], bf16: EngineMemory | None = BF16, ptq: EngineMemory | None = PTQ) -> list[Record]:
    """The memory records of a run, as an engine filled them."""
    found = []
    for record in records:
        if isinstance(record.data, MemoryData) and record.arm in ARMS:
            data = dataclasses.replace(record.data, serving={"bf16": bf16, "ptq": ptq}[record.arm], cache=COST)
            found.append(dataclasses.replace(record, data=data))
    return found


def rows_of(table: Table | None) -> dict[str, Row]:
    assert table is not None
    return {row.label: row for group in table.groups for row in group.rows}


def test_weights_cache_and_the_rest_are_rows_and_the_total_is_not_the_headline(records: list[Record]) -> None:
    rows = rows_of(capacity.serving(ARMS, served(records)))
    assert [c.text for c in rows["Weights after load"].cells] == ["14.48 GB", "4.500 GB"]
    assert rows["Weights after load"].cells[0].detail == "13.49 GiB"
    assert [c.text for c in rows["KV capacity"].cells] == ["1,000,000 tokens", "1,090,000 tokens"]
    assert rows["Activations"].cells[1].text == "not reported"
    assert rows["CUDA graphs and other"].cells[0].text == "not reported"
    assert list(rows)[-1] == "Process tree"
    text = capacity.headline(ARMS, served(records))
    assert text is not None
    assert "weights take 4.500 GB after load against 14.48 GB" in text.text
    assert "1,090,000 tokens of KV cache fit against 1,000,000 (+90,000)" in text.text
    assert "125" not in text.text


def test_no_headline_from_unequal_servers(records: list[Record]) -> None:
    assert capacity.headline(ARMS, served(records, ptq=None)) is None
    assert capacity.headline(ARMS, served(records, ptq=dataclasses.replace(PTQ, max_model_len=4096))) is None
    assert capacity.headline(ARMS, served(records, ptq=dataclasses.replace(PTQ, kv_cache_tokens=None))) is None
    assert capacity.serving(ARMS, served(records, None, None)) is None


def test_on_a_cpu_the_cache_has_the_size_it_was_given(records: list[Record]) -> None:
    on_cpu = [dataclasses.replace(r, engine=dataclasses.replace(r.engine, device="cpu")) for r in served(records)]
    assert capacity.headline(ARMS, on_cpu) is None
    table = capacity.serving(ARMS, on_cpu)
    assert table is not None
    assert "the size it was given" in table.note


def test_sequences_name_the_card(records: list[Record]) -> None:
    rows = rows_of(capacity.sequences(ARMS, served(records)))
    assert rows["KV cache per token"].cells[0].text == "131 kB"
    assert rows["KV cache per token"].cells[0].detail == "BF16; FP8 65.5, NVFP4 36.9"
    assert rows["One sequence of 4,096 tokens"].cells[0].text == "15.02 GB"
    assert rows["One sequence of 4,096 tokens"].cells[0].detail == "13.99 GiB, 24 GB card"
    assert rows["One sequence of 131,072 tokens"].cells[0].detail.endswith("no single card")


def test_an_older_record_has_no_cost(records: list[Record]) -> None:
    assert capacity.sequences(ARMS, records) is None
    assert capacity.serving(ARMS, records) is None


@pytest.mark.parametrize(
    ("emulated", "native", "tag"),
    [(True, False, ("emulated",)), (False, False, ("not native FP4",)), (False, True, ()), (False, None, ())],
)
def test_an_engine_without_fp4_arithmetic_is_marked(
    emulated: bool, native: bool | None, tag: tuple[str, ...], records: list[Record]
) -> None:
    record = served(records)[1]
    engine = dataclasses.replace(record.engine, emulated=emulated, native_fp4=native, kernel_path="MarlinNvFp4LinearKernel")
    marked = dataclasses.replace(record, engine=engine)
    table = next(block for block in provenance([marked], [], Run([], "", {}, [])) if isinstance(block, Table))
    cell = table.groups[0].rows[0].cells[1]
    assert cell.tags == tag
    assert "MarlinNvFp4LinearKernel" in cell.detail
    assert tables.engine_tags(engine) == tag
