"""Nothing is ever unpickled, compiled or run that came over a wire or out of a file: in the source, and at work."""

from __future__ import annotations

import ast
import functools
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import onebox
from tests.unit.house import threads_for_processes

SOURCE = Path(onebox.__file__).parent

MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "copyreg",
    "torch.distributed.rpc", "torch.distributed.checkpoint", "torch.multiprocessing", "multiprocessing", "xmlrpc",
}  # fmt: skip
"""Modules that nothing may import."""

CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.spawnv",
    "torch.load", "torch.save", "torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "yaml.load",
    "yaml.unsafe_load", "np.save", "np.load", "numpy.load", "np.fromfile", "pd.read_pickle", "joblib.load",
    "subprocess.getoutput", "subprocess.getstatusoutput", "types.FunctionType", "types.CodeType",
}  # fmt: skip
"""Functions that nothing may call or name."""

METHODS = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "send_pyobj", "recv_pyobj", "allow_pickle", "load_checkpoint_and_dispatch", "__reduce__",
    "__reduce_ex__", "__setstate__", "weights_only",
}  # fmt: skip
"""Attributes, methods and keywords that belong to something that pickles."""


REPLACED = {
    "graph/capture/attention.py": {"types.FunctionType"},
    "graph/capture/guards.py": {"types.FunctionType"},
    "graph/capture/reading.py": {"types.FunctionType"},
    "vgpu/distributed/ranks.py": {"torch.multiprocessing.spawn", "torch.multiprocessing.spawn.ProcessRaisedException"},
    "pool/sharing/attached_pool.py": {"multiprocessing.util", "multiprocessing.util.Finalize"},
    "vgpu/integration/shared_tensors.py": {"multiprocessing.reduction", "multiprocessing.reduction.ForkingPickler"},
}
"""Names that scripts use and that are given something else to do here: ranks are threads, and nothing is pickled. A
function of PyTorch itself that is called with another attention; two of onebox's own, with globals to which PyTorch may
add names. And the end of a process of ``multiprocessing``."""


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for an attribute of attributes of a name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@functools.cache  # the same names come again and again
def forbidden(name: str) -> bool:
    """Tell whether a name is that of a module, function or method that is not allowed, or in such a module."""
    roots = {name[:end] for end in range(1, len(name) + 1) if end == len(name) or name[end] == "."}
    return bool(roots & MODULES) or name in CALLS or name.rpartition(".")[2] in METHODS


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything in a module that is not allowed."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            names += [alias.name for alias in node.names if alias.name in METHODS]
        elif isinstance(node, ast.Call):
            shell = [word.value for word in node.keywords if word.arg == "shell"]
            if any(not (isinstance(value, ast.Constant) and value.value is False) for value in shell):
                yield node.lineno, "shell="
            names = [word.arg for word in node.keywords if word.arg in METHODS]
            is_import = dotted(node.func).endswith("import_module")
            names += [str(a.value) for a in node.args if is_import and isinstance(a, ast.Constant)]
        elif isinstance(node, ast.Attribute | ast.Name):
            names = [dotted(node)]
        for name in names:
            if forbidden(name):
                yield node.lineno, name


def test_there_is_source_to_look_at() -> None:
    assert len(sources()) > 50


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_source_has_nothing_of_the_kind(path: Path) -> None:
    replaced = REPLACED.get(str(path.relative_to(SOURCE)), set())
    found = offences(ast.parse(path.read_text(), str(path)))
    assert [(line, name) for line, name in found if name not in replaced] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import torch.distributed.rpc",
        "from torch.distributed import rpc",
        "import torch.distributed.checkpoint as dcp",
        "from multiprocessing import Queue",
        "torch.load(path)",
        "load = torch.load",
        "eval(text)",
        "x = exec",
        "os.system('ls')",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=shell)",
        "dist.broadcast_object_list(things)",
        "socket.send_pyobj(x)",
        "np.load(path, allow_pickle=True)",
        "numpy.frombuffer(x, allow_pickle=True)",
        "importlib.import_module('pickle')",
        "from torch.distributed import all_gather_object",
        "class A:\n    def f(self):\n        return super().__reduce__()",
    ],
)
def test_the_look_finds_it(text: str) -> None:
    assert list(offences(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["import json", "subprocess.run(c, shell=False)", "evaluate(x)", "self.compile(x)", "from torch import nn"]
)
def test_the_look_finds_nothing_else(text: str) -> None:
    assert not list(offences(ast.parse(text)))


# ---- while it works


class Hook:
    """Takes down what Python says when something is unpickled or marshalled."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)  # which cannot be taken away again

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in ("pickle.find_class", "os.system"):
            self.seen.append(f"{event} {arguments}")


@pytest.fixture(scope="module")
def hook() -> Hook:
    return Hook()


@pytest.fixture
def unpicklings(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is unpickled during a test: anything by these functions, classes by whatever unpickler."""
    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        original = getattr(module, name)

        def heard(*args: Any, call: Any = original, **kwargs: Any) -> Any:
            hook.seen.append(f"{call.__module__}.{call.__name__}")
            return call(*args, **kwargs)

        monkeypatch.setattr(module, name, heard)
    hook.seen.clear()
    hook.on = True
    yield hook.seen
    hook.on = False


def test_the_hook_hears(unpicklings: list[str]) -> None:
    pickle.loads(pickle.dumps(1))
    pickle._loads(pickle.dumps(np.float32))  # type: ignore[attr-defined]
    assert unpicklings[0] == "_pickle.loads"
    assert any("pickle.find_class" in seen for seen in unpicklings)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    return model, torch.optim.Adam(model.parameters())


def work(folder: Path) -> None:
    """Train, evaluate, save and resume, over workers that are threads of this process."""
    batch = torch.randn(6, 4), torch.randn(6, 3)
    syncs: list[Literal["workers", "client"]] = ["workers", "client"]
    with threads_for_processes() as opening:
        for sync in syncs:
            pool = opening(2)
            model, optimizer = make()
            with onebox.Trainer(
                model, functional.mse_loss, optimizer, pool=pool, plan=onebox.DataParallel(sync=sync)
            ) as trainer:
                float(trainer.step(*batch))
                trainer.evaluate([batch])
                trainer.save(folder, extra={"epoch": 1})
                trainer.pull()
            model, optimizer = make()
            with onebox.Trainer.resume(folder, model, functional.mse_loss, optimizer, pool=pool) as trainer:
                float(trainer.step(*batch))


def test_training_saving_and_resuming_unpickle_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    work(tmp_path)  # what PyTorch imports on first use is not looked at
    unpicklings: list[str] = request.getfixturevalue("unpicklings")
    work(tmp_path)
    assert unpicklings == []
