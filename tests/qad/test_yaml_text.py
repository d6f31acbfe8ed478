"""Foreign YAML: read in bounded time and memory, or refused in one short line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qad.errors import DataError, UsageError
from qad.recipes.load import load_recipe
from qad.recipes.strict_yaml import Strict, read_shipped
from qad.untrusted.yaml_text import read_yaml, strict_yaml

TENFOLD = "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 10)}]\n" for i in range(1, 9))
REFUSED = {
    "a whole number of 5,000 digits": (f"seed: {'9' * 5000}", "is no value that is taken, near line 1"),
    "the same in hexadecimal": (f"seed: 0x{'f' * 5000}", "is no value that is taken"),
    "2**64": (f"seed: {2**64}", "is no value that is taken"),
    "a day that does not exist": ("seed: 2020-13-45", "is no value that is taken"),
    "a word as a number": ("seed: !!float 1x", "is no value that is taken"),
    "half a character": (r'model: "\ud800"', "is no value that is taken"),
    "half a character as a key": (r'"\udfff": 1', "is no value that is taken"),
    "brackets": ("track: " + "[" * 50_000, "nested too deeply"),
    "braces": ("track: " + "{a: " * 20_000, "nested too deeply"),
    "blocks": ("- " * 40_000, "nested too deeply"),
    "aliases of aliases": ("k0: &k0 [x, x]\n" + TENFOLD, "more than the text could hold, near line"),
    "aliases of a long text": (f"a: &a {'x' * 9000}\nb: [{', '.join(['*a'] * 99)}]", "more than the text could hold"),
    "an alias of itself": ("track: &a [*a]", "stands for itself"),
    "a key of itself": ("track: &a {k: {l: *a}}", "stands for itself"),
    "an alias of nothing": ("track: *a", "undefined alias"),
    "a key twice": ("a: 1\nb: {c: 1, c: 2}", "key 'c' appears twice, near line 2"),
    "a long key twice": (f"? {'k' * 9000}\n: 1\n? {'k' * 9000}\n: 2", "appears twice"),
    "a key that is a list": ("? [a]\n: 1", "unhashable key"),
    "merged mappings": ("<<: {a: 1}", "could not determine a constructor"),
    "an object of Python": ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "a tag of its own": ("a: !function x.y", "could not determine a constructor"),
    "a long text": ("a" * 300_000, "300,000 characters"),
    "no YAML": ("model: [", "expected the node content"),
    "a control character": ("a: \x1b[31m", "special characters are not allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_in_one_short_line(name: str, tmp_path: Path) -> None:
    """By itself, in a recipe's file, behind --set, and in the file of a suite or a policy."""
    text, reason = REFUSED[name]
    file = tmp_path / "file.yaml"
    file.write_text(text, encoding="utf-8")
    (tmp_path / "good.yaml").write_text("model: m\n", encoding="utf-8")
    if len(text) > 100_000:
        reason = "characters|bytes"
    for read, error in (
        (lambda: strict_yaml(text), ValueError),
        (lambda: load_recipe(str(file)), UsageError),
        (lambda: load_recipe(str(tmp_path / "good.yaml"), [f"track={text}"]), UsageError),
        (lambda: read_shipped(Strict, str(file), tmp_path, "policy", "policies"), UsageError),
    ):
        with pytest.raises(error, match=reason) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_what_is_sound_is_read_as_it_is() -> None:
    text = "a: &a [1, -2.5, 1.0e-5, true, null, 2026-12-01, ünd]\nb: [*a, *a]\n18446744073709551615: {x: .inf}\n"
    value = strict_yaml(text)
    assert value["b"] == [value["a"]] * 2
    assert value["a"][:5] == [1, -2.5, 1e-5, True, None]
    assert value[2**64 - 1] == {"x": float("inf")}
    assert strict_yaml("") is None
    assert strict_yaml("a: !function x.y\nb: !any [1]\nc: 1", tags=True) == {"a": None, "b": None, "c": 1}
    with pytest.raises(ValueError, match="could not determine"):
        strict_yaml("a: !!python/name:os.system x", tags=True)


@pytest.mark.parametrize("override", ["seed=4294967296", "train.seed=4294967296", "seed=-1"])
def test_a_seed_is_one_that_every_generator_takes(override: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\ncalibrate: {data: python-docs}\ntrain: {data: python-docs, tokens: 100000}\n")
    with pytest.raises(UsageError, match=r"seed: Input should be (less|greater) than"):
        load_recipe(str(recipe), [override])
    assert load_recipe(str(recipe), ["seed=4294967295"]).seed == 2**32 - 1


def test_what_was_given_does_not_flood_the_message(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for text in (
        f"model: m\ndtype: {'x' * 90_000}",
        f"{'k' * 90_000}: 1",
        f"model: {{a: {'[' * 200 + ']' * 200}}}",
        "model: m\ntrain: [" + "x, " * 30_000 + "x]",
        f"model: m\nquantize: {{format: {'9' * 90_000}.5}}",
    ):
        recipe.write_text(text)
        with pytest.raises(UsageError) as caught:
            load_recipe(str(recipe))
        assert len(str(caught.value)) < 1000
        assert "\n" not in str(caught.value)


def test_a_pipe_is_no_recipe_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ValueError, match="no regular file"):
        read_yaml(tmp_path / "pipe.yaml")
    with pytest.raises(UsageError, match="neither a file nor"):
        load_recipe(str(tmp_path / "pipe.yaml"))
    with pytest.raises(UsageError, match="neither a file nor"):
        read_shipped(Strict, str(tmp_path / "pipe.yaml"), tmp_path, "policy", "policies")


def test_task_files_are_read_by_the_same_rules(tmp_path: Path) -> None:
    from harness.accuracy.task_files import _local_tasks

    (tmp_path / "good.yaml").write_text("task: sums\ndoc_to_text: !function code.run\n")
    assert _local_tasks(tmp_path) == {"sums": tmp_path / "good.yaml"}
    (tmp_path / "bad.yaml").write_text("k0: &k0 [x, x]\n" + TENFOLD)
    with pytest.raises(DataError, match="an alias stands for more"):
        _local_tasks(tmp_path)
