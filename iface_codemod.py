"""Rewrites calls of Trainer, Trainer.resume, make_plan and estimate_memory with flat options to groups of options.

Usage: python iface_codemod.py FILE.py ...; run ``ruff format`` afterwards. Places that need a person are printed.
Calls that forward ``**options`` get ``**grouped(...)`` of tests.trainer_arguments around all their options.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

GROUPS = {
    "plan": ("DataParallel", ("micro_batch", "shares", "sync", "update", "shard_optimizer")),
    "stale": ("StaleGradients", ("staleness", "delay", "warm_up")),
    "recovery": ("Recovery", ("recover", "snapshot_every")),
    "staging": ("Staging", ("ahead_bytes", "cache")),
    "engine": ("Engine", ("in_flight", "overlap", "fuse", "trace", "check_every", "costs")),
}
FIELDS = {"delay": "correction", "ahead_bytes": "ahead"}
KNOWN = {name for _, names in GROUPS.values() for name in names}


def kind_of(call: ast.Call) -> str | None:
    func = call.func
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    if name == "Trainer":
        return "Trainer"
    if name == "resume" and isinstance(func, ast.Attribute) and ast.unparse(func.value).endswith("Trainer"):
        return "Trainer"
    return name if name in ("make_plan", "estimate_memory") else None


def constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else ...


def rewritten(call: ast.Call, kind: str, text: str, prefix: str, where: str) -> str | None:
    """Return the new text of a call's keywords; None if they stay."""
    part = lambda node: ast.get_source_segment(text, node) or ""
    flat = {k.arg: k.value for k in call.keywords if k.arg}
    spread = [k for k in call.keywords if k.arg is None]
    ours = [name for name in flat if name in KNOWN]
    if kind == "make_plan":
        ours = [name for name in ours if name in ("staleness", "delay")]
    if kind == "estimate_memory":
        ours = [name for name in ours if name in ("micro_batch", "update", "shard_optimizer")]
    grouped_already = any("grouped(" in part(k.value) for k in spread)
    none_plan = kind == "Trainer" and "plan" in flat and constant(flat["plan"]) is None
    if kind == "Trainer" and spread and not grouped_already:
        inside = [f"{k.arg}={part(k.value)}" if k.arg else f"**{part(k.value)}" for k in call.keywords]
        return f"**grouped({', '.join(inside)})"
    if not ours and not none_plan:
        return None
    hard = ("staleness", "recover")
    if any(name in flat and constant(flat[name]) is ... for name in hard):
        if kind == "Trainer" and not spread:
            inside = [f"{k.arg}={part(k.value)}" for k in call.keywords]
            return f"**grouped({', '.join(inside)})"
        print(f"{where}: by hand")
        return None
    pieces: list[str] = []
    done: set[str] = set()
    for keyword in call.keywords:
        name = keyword.arg
        if name is None:
            pieces.append(f"**{part(keyword.value)}")
            continue
        if name == "plan" and constant(keyword.value) is None:
            continue
        if name not in ours:
            pieces.append(f"{name}={part(keyword.value)}")
            continue
        group, (cls, names) = next((g, v) for g, v in GROUPS.items() if name in v[1])
        if group in done:
            continue
        done.add(group)
        if group == "plan" and "plan" in flat and constant(flat["plan"]) is not None:
            print(f"{where}: plan and {name}")
            return None
        fields = {n: flat[n] for n in names if n in ours}
        if group == "stale":
            if constant(fields.pop("staleness", None)) == 0:
                continue
        if group == "recovery":
            recover = fields.pop("recover", None)
            if constant(recover) is False:
                pieces.append("recovery=None")
                continue
            if recover is not None and constant(recover) is None and not fields:
                continue
        inner = ", ".join(f"{FIELDS.get(n, n)}={part(v)}" for n, v in fields.items())
        pieces.append(f"{group}={prefix}{cls}({inner})")
    return ", ".join(pieces)


def main(path: Path) -> None:
    text = path.read_text()
    for _ in range(200):
        tree = ast.parse(text)
        lines = text.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line.encode()))
        data = text.encode()
        changed = False
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and kind_of(node) and node.keywords]
        for call in calls:
            first, last = call.keywords[0], call.keywords[-1]
            if any((a.lineno, a.col_offset) > (first.lineno, first.col_offset) for a in call.args):
                print(f"{path}:{call.lineno}: positional after keyword")
                continue
            new = rewritten(call, kind_of(call) or "", text, "onebox.", f"{path}:{call.lineno}")
            if new is None:
                continue
            begin = starts[first.lineno - 1] + first.col_offset
            end = starts[last.end_lineno - 1] + last.end_col_offset
            if b"#" in data[begin:end]:
                print(f"{path}:{call.lineno}: a comment was lost")
            text = (data[:begin] + new.encode() + data[end:]).decode()
            changed = True
            break
        if not changed:
            break
    before = path.read_text()
    if text == before:
        return
    head = "from __future__ import annotations\n"
    if "grouped(" in text and "trainer_arguments" not in text:
        text = text.replace(head, head + "from tests.trainer_arguments import grouped\n", 1)
    if "onebox." in text and "\nimport onebox\n" not in text:
        text = text.replace(head, head + "import onebox\n", 1)
    path.write_text(text)
    print(f"{path}: changed")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(Path(name))
