"""Write the tables of fields, errors, metrics and options in the pages from the code: ``python -m docs.tables``.

A table is between two comments, ``<!-- docs/tables.py: NAME -->`` and ``<!-- end -->``; its texts are those of
docstrings and of the help of metrics. The page of the command line is written whole.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from docs import command_line
from onebox import errors
from onebox.agent.metrics import AgentMetrics
from onebox.cli.training.training_loop import EpochResult
from onebox.engine.islands.membership import IslandChange
from onebox.engine.recovery.policy import RecoveryRecord
from onebox.engine.steps.link_use import LinkUse
from onebox.feed.pipeline.counters import StageCounters
from onebox.feed.prepare.preparation import SkippedSample
from onebox.plan.model.plan import Plan, Prediction
from onebox.plan.model.stage import Stage
from onebox.plan_names import SCHEDULE_TRAITS
from onebox.wire.protocol.agents import Offer, Stock
from tests.launchers import cases

DOCS = Path(__file__).resolve().parent
_PLACE = re.compile(r"(<!-- docs/tables\.py: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_NOUNS = {int: "integer", float: "number", str: "text", bool: "boolean"}
_NUMBERS = {2: "two", 3: "three"}

Table = Callable[[], str]


def pages() -> dict[Path, str]:
    """Return the text of each page that has a table, or is made whole."""
    made = {command_line.PAGE: command_line.page()}
    left = tables()
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        names = [name for _, name, _ in _PLACE.findall(text)]
        if names:
            made[path] = filled(text, {name: left.pop(name)() for name in names})
    if left:
        raise ValueError(f"tables that no page has: {', '.join(left)}")
    return made


def filled(text: str, found: Mapping[str, str]) -> str:
    """Return the text of a page with these tables, each in its place."""
    return _PLACE.sub(lambda place: f"{place[1]}\n{found[place[2]]}\n\n{place[3]}", text)


def tables() -> dict[str, Table]:
    """Return the functions that make the tables, by name."""
    own = [kind for kind in vars(errors).values() if inspect.isclass(kind) and error_fields(kind)]
    records = {
        "epoch": EpochResult,
        "recovery": RecoveryRecord,
        "island": IslandChange,
        "stages": StageCounters,
        "first_skipped": SkippedSample,
        "links": LinkUse,
    }
    return {
        "fields of a plan": lambda: plan_fields(Plan, schedule=SCHEDULE_TRAITS),
        "fields of a stage": lambda: plan_fields(Stage),
        "fields of a prediction": lambda: plan_fields(Prediction),
        "tree of errors": lambda: error_tree(errors.__doc__ or ""),
        **{f"fields of {kind.__name__}": partial(_error_meanings, kind) for kind in own},
        **{f"fields of {name}": partial(_record_meanings, kind) for name, kind in records.items()},
        "metrics of an agent": agent_metrics,
        "cases of launchers": lambda: cases.table(cases.pinned_versions()),
    }


def plan_fields(kind: type[msgspec.Struct], **allowed: Iterable[str]) -> str:
    """Return the table of the fields of an object in a plan file.

    Args:
        kind: Its class.
        **allowed: Values of fields whose type does not say them.
    """
    hints, texts, rows = typing.get_type_hints(kind), described(kind), []
    for field in msgspec.structs.fields(kind):
        given = allowed.get(field.name)
        shown = hint_text(hints[field.name]) if given is None else _either([f"`{value}`" for value in given])
        default = "required" if field.default is msgspec.NODEFAULT else f"`{json.dumps(field.default)}`"
        rows.append((f"`{field.name}`", shown, default.replace('"', ""), _in_json(texts[field.name])))
    return markdown(("field", "type", "default", "meaning"), rows)


def hint_text(hint: Any, *, several: bool = False) -> str:
    """Describe a type as it is in JSON: one value of it, or several."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (one,) = (part for part in parts if part is not type(None))
        values = typing.get_args(one) if typing.get_origin(one) is typing.Literal else ()
        return _either([*(f"`{value}`" for value in values), "`null`"]) if values else f"{hint_text(one)} or `null`"
    if origin is typing.Literal:
        return _either([f"`{part}`" for part in parts])
    if origin is tuple:
        count = "" if parts[-1] is Ellipsis else f"{_NUMBERS[len(parts)]} "
        return f"list{'s' * several} of {count}{hint_text(parts[0], several=True)}"
    if hint in _NOUNS:
        return _NOUNS[hint] + "s" * (several and hint is not str)
    name = hint.__name__.lower()
    return f"[{name}{'s' * several}](#{name})"


def error_tree(text: str) -> str:
    """Return the picture of the tree in the docstring of the errors."""
    (picture,) = re.findall(r"^ {4}OneboxError\n(?: {4}.+\n)+", text, re.MULTILINE)
    return f"```text\n{textwrap.dedent(picture)}```"


def error_fields(kind: type[object]) -> dict[str, str]:
    """Return the fields that an error has beside those of its base, with their meanings."""
    if "__init__" not in vars(kind):
        return {}
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(vars(kind)["__init__"]))).body
    assert isinstance(made, ast.FunctionDef)
    texts = described(kind)
    found = {each.arg: texts[each.arg] for each in made.args.kwonlyargs}
    for line, below in zip(made.body, made.body[1:], strict=False):
        match line, below:
            case (
                ast.Assign(targets=[ast.Attribute(attr=name)]) | ast.AnnAssign(target=ast.Attribute(attr=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = phrase(text)
    return found


def agent_metrics() -> str:
    """Return the table of an agent's metrics, with their help."""
    stock = Stock(1, (Offer("cpu", "chip", 1, 1, 1, load=0.5),))
    found = AgentMetrics(lambda: stock, lambda: {"leased": 1}).collect()
    rows = [
        (f"`{each.name}{'_total' if each.type == 'counter' else ''}`", each.type, phrase(each.documentation))
        for each in found
    ]
    return markdown(("metric", "type", "meaning"), rows)


def _error_meanings(kind: type[object]) -> str:
    return meanings(error_fields(kind))


def _record_meanings(kind: Any) -> str:
    texts = described(kind)
    return meanings({field.name: _in_json(texts[field.name]) for field in dataclasses.fields(kind)})


def _in_json(text: str) -> str:
    return text.replace("`None`", "`null`")


def meanings(texts: Mapping[str, str]) -> str:
    """Return the table of fields and their meanings."""
    return markdown(("field", "meaning"), [(f"`{name}`", text) for name, text in texts.items()])


def described(kind: type[object]) -> dict[str, str]:
    """Return what the docstring of a class says of each of its arguments."""
    _, _, text = (inspect.getdoc(kind) or "").partition("\nArgs:\n")
    section = re.split(r"^\S", text, maxsplit=1, flags=re.MULTILINE)[0]
    return {name: phrase(about) for name, about in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)}


def phrase(text: str) -> str:
    """Return a text of a docstring as a cell of a table: in Markdown."""
    text = " ".join(text.split()).removesuffix(".")
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    text = text.replace("``", "`").replace("|", "\\|")
    return text[0].lower() + text[1:] if re.match(r"[A-Z]([a-z]| )", text) else text


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    titles = tuple(head)
    lines = [" | ".join(row) for row in (titles, *rows)]
    return "\n".join([f"| {lines[0]} |", "|" + "---|" * len(titles), *(f"| {line} |" for line in lines[1:])])


def _either(values: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(values[:-1]), values[-1])))


if __name__ == "__main__":
    for page, written in pages().items():
        page.write_text(written, encoding="utf-8")
