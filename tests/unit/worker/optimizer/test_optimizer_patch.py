"""Optimizers of a worker leave torch's compiler alone; that their steps have the same bits is in test_native."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from onebox.worker.optimizer.native import ALLOWED
from onebox.worker.optimizer.optimizer_patch import without_compiler

STEPS = """
import sys
import torch
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.worker.optimizer.native import ALLOWED, NativeOptimizer
from onebox.worker.programs.bindings import TENSOR, fastest

assert fastest(torch.ops.aten.mm.default, (TENSOR, TENSOR), {}) is not torch.ops.aten.mm.default._op
for name in ALLOWED:
    if hasattr(torch.optim, name):
        delay = "predict" if name in ("SGD", "AdamW", "Muon") else "none"
        spec = OptimizerSpec(name, (((0, 1), {"lr": 0.1}),), (1, 2), delay=delay)
        native = NativeOptimizer(spec, [torch.ones(3, 4), torch.ones(4, 3)], [])
        for _ in range(2):
            native.step([torch.ones(3, 4), torch.ones(4, 3)], 1.0, late=True)
            native.expect(0, torch.empty(3, 4))
        native.set_options(({"lr": 0.2},))
        assert native.state()[0] or name == "SGD", name
print("torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
"""


def test_nothing_of_the_compiler_is_imported() -> None:
    """By the search for direct bindings neither.

    Where torch has moved what it is wrapped in, this fails, and workers are slow to begin, but right.
    """
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("False False\n", "")


@pytest.mark.parametrize("name", ALLOWED)
def test_it_is_the_class_in_all_else(name: str) -> None:
    made = getattr(torch.optim, name)
    weight = torch.ones(2, 2)
    mine, theirs = without_compiler(name)([weight]), made([weight])
    assert isinstance(mine, made)
    assert type(mine).__name__ == name
    assert mine.defaults == theirs.defaults
    assert mine.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    assert [*mine.state[weight]] == [*theirs.state[weight]]
    assert without_compiler(name) is type(mine)


def test_a_step_needs_no_gradients_of_its_own() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    without_compiler("SGD")([weight], lr=0.5).step()
    assert weight.tolist() == [0.5, 0.5]
    assert torch.is_grad_enabled()
