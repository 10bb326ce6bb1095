"""The hand-written parts of the reference have every variable, error, record and benchmark that there is."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import onebox
from onebox import errors
from onebox.cli.training import run_summary, training_loop
from onebox.cluster.spec import parse_ray
from onebox.plan.model.plan import Plan
from onebox.pool.discovery import requested_devices
from onebox.pool.launch import zygotes
from onebox.pool.spec import parse_spec

ROOT = Path(__file__).parents[2]
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text()


def section(text: str, title: str) -> str:
    level = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert level, title
    rest = text[level.end() :]
    return re.split(rf"^#{{1,{len(level[1])}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of all tables that begin with a code word."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def named(text: str) -> set[str]:
    """Return the code words in the first cells of a table."""
    return {word for row in rows(text) for word in re.findall(r"`([^`]+)`", row[0])}


def test_the_plan_on_the_page_is_one() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", page("plan-file"), re.DOTALL)
    assert len(Plan.from_json(text).stages) == 2


def test_every_variable_of_onebox_is_there() -> None:
    used = set(re.findall(r"\bONEBOX_[A-Z_]+\b", SOURCE))
    assert named(section(page("environment"), "Variables of onebox")) == used


def test_variables_that_reach_workers_are_there() -> None:
    text = section(page("environment"), "Variables that reach workers")
    assert set(zygotes._HANDED_ON) <= set(re.findall(r"`(\w+)`", text))
    families = {name.removesuffix("*") for name in re.findall(r"`([A-Z_]+\*)`", text)}
    assert families == set(zygotes._FAMILIES)
    set_here = zygotes.worker_environment(2)
    assert {name for name in set_here if name.startswith(("MALLOC", "OPENBLAS"))} <= set(re.findall(r"`(\w+)`", text))


def test_every_public_name_is_documented() -> None:
    documented = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", page("api"), re.MULTILINE))
    assert {f"onebox.{name}" for name in onebox.__all__ if name != "OneboxError"} <= documented
    assert {f"onebox.errors.{name}" for name in public_errors()} <= documented
    modules = [path for path in (ROOT / "src" / "onebox" / "integrations").glob("*.py") if path.stem != "__init__"]
    lists = {path.stem: re.search(r"^__all__ = \[(.*?)\]", path.read_text(), re.MULTILINE) for path in modules}
    names = {
        f"onebox.integrations.{stem}.{name}"
        for stem, found in lists.items()
        if found
        for name in re.findall(r"\w+", found[1])
    }
    assert names <= documented and names


def public_errors() -> dict[str, type[errors.OneboxError]]:
    found = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
    return {name: kind for name, kind in found.items() if issubclass(kind, errors.OneboxError)}


def test_every_error_has_a_section_with_cause_and_remedy() -> None:
    text = page("errors")
    titles = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sorted(titles) == sorted(public_errors().keys() - {"OneboxError"})
    for name in titles:
        about = section(text, name)
        assert "**Cause:**" in about and ("**Remedy:**" in about or name == "WorkerError"), name


def keys_of(function: Any) -> set[str]:
    """Return the keys of the dict that a function returns."""
    tree = ast.parse(inspect.getsource(function))
    (returned,) = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    assert isinstance(returned, ast.Dict)
    return {key.value for key in returned.keys if isinstance(key, ast.Constant)}


def test_every_record_of_a_run_is_there() -> None:
    records = [row for row in rows(section(page("metrics"), "metrics.jsonl")) if len(row) == 3]
    table = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in records if row[0] != "`event`"}
    assert set(table) == set(re.findall(r'"event": "(\w+)"', inspect.getsource(training_loop)))
    assert table["decision"] == keys_of(training_loop.decision_data)


def test_every_file_of_a_run_is_there() -> None:
    assert set(run_summary._CONTENTS) <= {name.strip("/") for name in named(section(page("metrics"), "Files of a run"))}


def test_every_field_of_a_summary_is_there() -> None:
    assert named(section(page("metrics"), "summary.json")) - {"text", "metrics.jsonl"} == keys_of(run_summary._summary)


def specifications() -> list[str]:
    return [word for row in rows(page("pools")) if len(row) == 2 for word in re.findall(r"`([^`]+)`", row[0])]


@pytest.mark.parametrize("spec", specifications())
def test_every_pool_on_the_page_is_understood(spec: str) -> None:
    parts = parse_spec(spec)
    if spec.startswith("ray"):
        assert parse_ray(spec).spec == spec
    elif "/" not in spec and "lab" not in spec and "cuda" not in spec:
        assert requested_devices(spec)
    assert parts


def test_every_package_is_on_the_page_of_the_architecture() -> None:
    text = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    folders = {path.parent.name for path in (ROOT / "src" / "onebox").glob("*/__init__.py")}
    assert folders <= named(section(text, "Packages and layers"))


def test_every_benchmark_is_there() -> None:
    written = set(re.findall(r"benchmarks/(\w+)\.py", page("benchmarks")))
    results = set(re.findall(r"^## (\w+)\.py", (ROOT / "benchmarks" / "results.md").read_text(), re.MULTILINE))
    assert results <= written
