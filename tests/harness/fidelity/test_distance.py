from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.engines.transformers import LoadedModel
from harness.fidelity.distance import measure_fidelity, token_kl, token_quantiles
from qad.errors import BrokenCheckpointError, DataError

Model = Callable[[Tensor], torch.nn.Module]


def sequences(lengths: list[int], vocabulary: int = 512) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(f"doc{i}", torch.randint(vocabulary, (n,), generator=generator)) for i, n in enumerate(lengths)]


def perturbed(tiny: LoadedModel, amount: float = 0.02) -> torch.nn.Module:
    import copy

    model: torch.nn.Module = copy.deepcopy(tiny.model)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount * torch.randn_like(parameter))
    return model


def test_kl_by_hand_on_two_tokens(table_model: Model) -> None:
    """Teacher and student always say (p, 1-p) and (q, 1-q), whatever came before."""
    p, q = 0.8, 0.4
    teacher = table_model(torch.tensor([[p, 1 - p]] * 2).log())
    student = table_model(torch.tensor([[q, 1 - q]] * 2).log())
    data = measure_fidelity({"ptq": student}, teacher, [("a", torch.tensor([1, 0, 1, 0]))], "text")["ptq"]
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    (sequence,) = data.sequences
    assert (sequence.cluster, sequence.tokens, sequence.top1_agree) == ("a", 3, 0)
    assert sequence.kl_sum == pytest.approx(3 * kl, rel=1e-6)
    assert sequence.nll_teacher_sum == pytest.approx(-2 * math.log(p) - math.log(1 - p), rel=1e-6)
    assert sequence.nll_student_sum == pytest.approx(-2 * math.log(q) - math.log(1 - q), rel=1e-6)
    assert data.token_kl == pytest.approx(dict.fromkeys(("p50", "p90", "p99", "p99_9", "max"), kl), rel=1e-6)


def test_top1_counts_positions(table_model: Model) -> None:
    """After token 0 the two agree, after token 1 they do not."""
    teacher = table_model(torch.tensor([[2.0, 0.0], [2.0, 0.0]]))
    student = table_model(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    data = measure_fidelity({"q": student}, teacher, [("a", torch.tensor([0, 0, 1, 1, 1, 0]))], "text")["q"]
    assert (data.sequences[0].tokens, data.sequences[0].top1_agree) == (5, 2)


def test_a_model_is_at_distance_zero_from_its_copy(tiny: LoadedModel) -> None:
    import copy

    measured = measure_fidelity({"copy": copy.deepcopy(tiny.model)}, tiny.model, sequences([20, 31]), "text")
    for sequence in measured["copy"].sequences:
        assert sequence.kl_sum == 0.0
        assert sequence.top1_agree == sequence.tokens
        assert sequence.nll_student_sum == sequence.nll_teacher_sum > 0
    assert set(measured["copy"].token_kl.values()) == {0.0}
    assert measured["copy"] == measured["bf16"]


def test_kl_against_a_direct_computation(tiny: LoadedModel) -> None:
    student = perturbed(tiny)
    data = measure_fidelity({"ptq": student}, tiny.model, sequences([40]), "text")["ptq"]
    ids = sequences([40])[0][1][None]
    with torch.no_grad():
        p, q = (m(input_ids=ids).logits[0, :-1].double().softmax(-1) for m in (tiny.model, student))
    kl = torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1)
    assert data.sequences[0].kl_sum == pytest.approx(float(kl.sum()), rel=1e-9)
    assert data.sequences[0].kl_sum > 1e-3
    assert data.token_kl["max"] == pytest.approx(float(kl.max()), rel=1e-9)
    nll = -q.log().gather(1, ids[0, 1:, None]).sum()
    assert data.sequences[0].nll_student_sum == pytest.approx(float(nll), rel=1e-9)


def test_batches_and_chunks_change_nothing(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    student, data = perturbed(tiny), sequences([16, 16, 16, 9, 16, 9, 9])
    one = measure_fidelity({"ptq": student}, tiny.model, data, "text")["ptq"]
    many = measure_fidelity({"ptq": student}, tiny.model, data, "text", batch_size=3)["ptq"]
    monkeypatch.setattr("harness.fidelity.distance._CHUNK_ELEMENTS", 5 * 512)
    chunked = measure_fidelity({"ptq": student}, tiny.model, data, "text")["ptq"]
    assert [s.cluster for s in many.sequences] == [cluster for cluster, _ in data]
    for other in (many, chunked):
        assert [s.tokens for s in other.sequences] == [15, 15, 15, 8, 15, 8, 8]
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert a.kl_sum == pytest.approx(b.kl_sum, rel=1e-3)
            assert a.nll_student_sum == pytest.approx(b.nll_student_sum, rel=1e-5)
    assert [s.kl_sum for s in chunked.sequences] == pytest.approx([s.kl_sum for s in one.sequences], rel=1e-12)


def test_the_teacher_runs_once_for_all_students(table_model: Model) -> None:
    table = torch.zeros(5, 5)
    teacher, first, second = table_model(table), table_model(table), table_model(table)
    seen: list[int] = []
    measured = measure_fidelity({"ptq": first, "qad": second}, teacher, sequences([4, 4, 6], 5), "text", seen.append)
    assert list(measured) == ["bf16", "ptq", "qad"]
    assert teacher.forwards == first.forwards == second.forwards == [(1, 4), (1, 4), (1, 6)]
    assert seen == [1, 1, 1]


def test_kl_is_never_negative_and_masked_tokens_are_zero() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2000, 64, dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    log_q = (logits + 1e-12 * torch.randn_like(logits)).log_softmax(-1)
    assert (log_p.exp() * (log_p - log_q)).sum(-1).min() < 0, "the case that the clamp is for does not occur"
    assert token_kl(log_p, log_q).min() == 0.0
    masked = torch.tensor([[0.5, 0.5, 0.0]]).log()
    other = torch.tensor([[0.25, 0.75, 0.0]]).log()
    assert token_kl(masked, other).item() == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))
    assert token_kl(torch.tensor([[torch.nan, 0.0]]), torch.zeros(1, 2)).isnan().all()


def test_quantiles_are_linear_between_neighbours() -> None:
    values = torch.rand(1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.quantile(values, torch.tensor([0.5, 0.9, 0.99, 0.999], dtype=torch.float64))
    assert list(token_quantiles(values).values()) == pytest.approx(expected.tolist(), rel=1e-12)
    assert token_quantiles(torch.tensor([2.0])) == dict.fromkeys(("p50", "p90", "p99", "p99_9"), 2.0)


def test_numbers_that_are_none(table_model: Model) -> None:
    good, text = table_model(torch.zeros(2, 2)), [("a", torch.tensor([0, 1, 0]))]
    for bad in ([[torch.nan, 0.0], [0.0, 0.0]], [[0.0, 0.0], [-torch.inf, 0.0]]):
        with pytest.raises(BrokenCheckpointError, match="logits of ptq"):
            measure_fidelity({"ptq": table_model(torch.tensor(bad))}, good, text, "text")
    with pytest.raises(BrokenCheckpointError, match="logits of bf16"):
        measure_fidelity({}, table_model(torch.full((2, 2), torch.nan)), text, "text")


def test_bad_input(tiny: LoadedModel, table_model: Model) -> None:
    model = table_model(torch.zeros(2, 2))
    with pytest.raises(DataError, match="no sequences"):
        measure_fidelity({}, model, [], "text")
    with pytest.raises(DataError, match="'short' has shape"):
        measure_fidelity({}, model, [("short", torch.tensor([1]))], "text")
    with pytest.raises(DataError, match="vocabulary of 3, its teacher one of 2"):
        measure_fidelity({"ptq": table_model(torch.zeros(3, 3))}, model, [("a", torch.tensor([0, 1]))], "text")
    with pytest.raises(DataError, match="rename the student"):
        measure_fidelity({"bf16": model}, model, [("a", torch.tensor([0, 1]))], "text")
    with pytest.raises(DataError, match="token id 512 is beyond the vocabulary of 512"):
        measure_fidelity({}, tiny.model, [("a", torch.tensor([0, 512]))], "text")


# --- strata, layers, continuations ---


def test_strata_add_up_to_the_whole(tiny: LoadedModel) -> None:
    text = sequences([40, 33, 40])
    data = measure_fidelity({"q": perturbed(tiny)}, tiny.model, text, "text", domains=["a", "b", "a"])["q"]
    assert data.by_position is not None
    assert data.by_entropy is not None
    assert data.by_domain is not None
    for strata in (data.by_position, data.by_entropy, data.by_domain):
        for i, sequence in enumerate(data.sequences):
            assert sum(s.tokens[i] for s in strata) == sequence.tokens
            assert sum(s.kl_sum[i] for s in strata) == pytest.approx(sequence.kl_sum, rel=1e-9)
            assert sum(s.top1_agree[i] for s in strata) == sequence.top1_agree
    assert [s.name for s in data.by_position] == ["1", "2-3", "4-7", "8-15", "16-31", "32-63"]
    assert [s.tokens for s in data.by_position][-1] == [8, 1, 8]
    assert {s.name: s.tokens for s in data.by_domain} == {"a": [39, 0, 39], "b": [0, 32, 0]}
    assert len(data.by_entropy) == 10
    assert {sum(s.tokens) for s in data.by_entropy} <= {11, 12}
    one_source = measure_fidelity({}, tiny.model, text, "text", domains=["a", "a", "a"])["bf16"]
    assert one_source.by_domain is None


def test_entropy_deciles_go_by_the_teacher(table_model: Model) -> None:
    """The teacher is sure after token 0 and knows nothing after token 1; the student errs only where it is sure."""
    teacher = table_model(torch.tensor([[9.0, 0.0], [0.0, 0.0]]))
    student = table_model(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    ids = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    data = measure_fidelity({"q": student}, teacher, [("a", ids)], "text")["q"]
    assert data.by_entropy is not None
    sure, unsure = data.by_entropy
    assert (sure.tokens, unsure.tokens) == ([3], [3])
    assert sure.kl_sum[0] == pytest.approx(data.sequences[0].kl_sum)
    assert unsure.kl_sum == [0.0]
    assert unsure.name.endswith(": 0.693-0.693 nats")


def test_layers_by_hand(tiny: LoadedModel) -> None:
    import copy

    from harness.fidelity.layers import measure_layers

    same, changed = copy.deepcopy(tiny.model), copy.deepcopy(tiny.model)
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.zero_()
    text = sequences([12, 9])
    found = measure_layers({"same": same, "changed": changed}, tiny.model, text)
    assert [layer.name for layer in found["same"]] == ["embedding", "layer 1", "layer 2"]
    assert [layer.error for layer in found["same"]] == [0.0] * 3
    errors = [layer.error for layer in found["changed"]]
    assert errors[:2] == [0.0, 0.0]
    with torch.no_grad():
        hidden = [[m(ids[None], output_hidden_states=True).hidden_states[2] for _, ids in text] for m in (tiny.model, changed)]
    top = sum(float(((a - b).double() ** 2).sum()) for a, b in zip(*hidden, strict=True))
    assert errors[2] == pytest.approx(top / sum(float((a.double() ** 2).sum()) for a in hidden[0]), rel=1e-4)


def test_continuations_by_hand(tiny: LoadedModel) -> None:
    import copy

    from harness.fidelity.continuations import measure_continuations

    text = sequences([20, 9, 30])
    students = {"same": copy.deepcopy(tiny.model), "far": perturbed(tiny, 0.5)}
    found = measure_continuations(students, tiny.model, text, prompt_tokens=10, new_tokens=6)
    assert [entry.cluster for entry in found["same"]] == ["doc0", "doc2"], "what is no longer than its prompt is left out"
    for entry in found["same"]:
        assert not entry.diverged
        assert entry.nll_student == entry.nll_teacher > 0
    assert any(entry.diverged and entry.equal < 6 for entry in found["far"])
    assert found == measure_continuations(students, tiny.model, text, prompt_tokens=10, new_tokens=6)
    own = []
    for model in (tiny.model, students["far"]):
        ids = text[0][1][:10]
        with torch.no_grad():
            for _ in range(6):
                ids = torch.cat([ids, model(ids[None], use_cache=False).logits[0, -1].argmax()[None]])
        own.append(ids[10:].tolist())
    equal = next((i for i, (a, b) in enumerate(zip(*own, strict=True)) if a != b), 6)
    assert found["far"][0].equal == equal
    with pytest.raises(DataError, match=r"no sequence .* longer than a prompt of 99"):
        measure_continuations(students, tiny.model, text, prompt_tokens=99, new_tokens=6)


def test_a_comparison_shows_the_strata(tiny: LoadedModel) -> None:
    import dataclasses

    from harness.compare.distance import compare_fidelity
    from harness.fidelity.continuations import measure_continuations
    from harness.fidelity.layers import measure_layers
    from harness.records.record import Record, from_json, to_json

    student, text = perturbed(tiny), sequences([40, 33, 40, 25])
    data = measure_fidelity({"ptq": student}, tiny.model, text, "text", domains=["a", "b", "a", "b"])["ptq"]
    students = {"ptq": student}
    data = dataclasses.replace(
        data,
        by_layer=measure_layers(students, tiny.model, text)["ptq"],
        continuations=measure_continuations(students, tiny.model, text, prompt_tokens=8, new_tokens=4)["ptq"],
    )
    record = Record("ptq", "tiny", "hash", tiny.engine, {}, {}, "", 1.0, data)
    assert from_json(to_json(record)) == record
    row = compare_fidelity({"ptq": record}, []).rows["ptq"]
    assert list(row.by_domain) == ["a", "b"]
    assert len(row.by_entropy) == 10
    assert row.by_position["1"].value == pytest.approx(sum(data.by_position[0].kl_sum) / 4)  # type: ignore[index]
    whole = sum(e.value * sum(s.tokens) for e, s in zip(row.by_domain.values(), data.by_domain or [], strict=True))
    assert whole / row.tokens == pytest.approx(row.kl.value)
    assert row.by_domain["a"].clusters == 2
    assert list(row.by_layer) == ["embedding", "layer 1", "layer 2"]
    assert row.equal_tokens is not None
    assert row.diverged is not None
    assert 0 <= row.diverged.value <= 1
    assert row.written_ratio is not None
    assert row.written_ratio.value > 1
    assert row.bound == ""
