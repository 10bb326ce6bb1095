"""Patches of PyTorch: applied and removed together, so that everything is as it was."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from onebox.errors import PoolError
from onebox.vgpu.patches import Patch, Patches


def owner(**values: Any) -> Any:
    return SimpleNamespace(**values)


def test_applied_once_and_removed_to_what_was_there() -> None:
    here, there = owner(value=1), owner(value=1, __name__="there")
    patches = Patches(
        (
            Patch(here, "value", lambda value: value + 1, also=(there,)),
            Patch(here, "new", lambda value: (value, "made"), added=True),
        )
    )
    patches.apply()
    patches.apply()
    assert (here.value, there.value, here.new) == (2, 2, (None, "made"))
    patches.remove()
    patches.remove()
    assert (here.value, there.value) == (1, 1)
    assert not hasattr(here, "new")


def test_what_is_inherited_is_inherited_again() -> None:
    class Base:
        def name(self) -> str:
            return "base"

    class Derived(Base):
        pass

    patches = Patches((Patch(Derived, "name", lambda name: lambda self: name(self) + "!"),))
    patches.apply()
    assert (Derived().name(), Base().name()) == ("base!", "base")
    patches.remove()
    assert "name" not in vars(Derived)


def test_an_attribute_that_pytorch_lacks() -> None:
    here = owner(first=1, __name__="torch.here")
    patches = Patches((Patch(here, "first", lambda value: 2), Patch(here, "second", lambda value: 2)))
    with pytest.raises(PoolError, match=r"has no torch\.here\.second, which virtual devices replace"):
        patches.apply()
    assert here.first == 1


def test_a_patch_for_other_versions_is_left_out() -> None:
    here = owner(value=1)
    patches = Patches(
        (Patch(here, "value", lambda value: 2, since=(99, 0)), Patch(here, "absent", lambda value: 2, until=(1, 0)))
    )
    patches.apply()
    assert here.value == 1
    patches.remove()


def test_entries_of_lists_and_dictionaries() -> None:
    items, mapping, done = ["a"], {"a": 1}, []

    def entries(patches: Patches) -> None:
        patches.append(items, "a")
        patches.append(items, "b")
        patches.put(mapping, "a", 2)
        patches.put(mapping, "b", 3)
        patches.on_removal(lambda: done.append(1))

    patches = Patches((entries,))
    patches.apply()
    assert (items, mapping, done) == (["a", "b"], {"a": 2, "b": 3}, [])
    patches.remove()
    assert (items, mapping, done) == (["a"], {"a": 1}, [1])


def test_threads_apply_a_set_once() -> None:
    here = owner(value=0)
    patches = Patches((Patch(here, "value", lambda value: value + 1),))
    threads = [threading.Thread(target=patches.apply) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert here.value == 1
    patches.remove()
    assert here.value == 0


SCRIPT = """
import signal, sys, types
import torch, torch.distributed, torch.nn.parallel, torch.accelerator, torch.cuda.nccl, torch.jit, torch.nested
import torch._dynamo, torch._dynamo.variables.builder, torch.fft, torch._subclasses.fake_tensor
from torch.nn.modules import lazy
from torch.nn import parameter


def attributes():
    found = {}
    names = [name for name in sys.modules if name == "torch" or name.startswith(("torch.", "multiprocessing."))]
    for name in [*names, "signal"]:
        module = sys.modules[name]
        for key, value in list(vars(module).items()):
            if key.startswith("__") or isinstance(value, types.ModuleType):
                continue
            found[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("torch"):
                for inner, item in vars(value).items():
                    if isinstance(item, types.FunctionType | property | bool | staticmethod):
                        found[name, key, inner] = item
    return found


import onebox
import onebox.vgpu
from onebox.vgpu.compile.dynamo import DYNAMO
from onebox.vgpu.distributed.ranks import WORLDS
DYNAMO.remove()  # applied by the import of the backend
handler = signal.getsignal(signal.SIGINT)
onebox.vgpu.install()  # registers the device, which stays
onebox.vgpu.uninstall()
foreach_types = sys.modules["torch.optim.optimizer"]._foreach_supported_types
lengths = len(foreach_types), len(torch.serialization._package_registry)
before = attributes()
modules = {key[0] for key in before}
for _ in range(2):
    onebox.vgpu.install()
    WORLDS.apply()
    DYNAMO.apply()
    alias = onebox.vgpu.alias_cuda()
    during = attributes()
    assert sum(during.get(key) is not value for key, value in before.items()) > 100
    assert torch.cuda.device_count() == 0 and torch.device("vgpu").type == "vgpu"
    onebox.vgpu.uninstall()
    after = attributes()
    changed = [key for key, value in before.items() if after.get(key) is not value]
    added = [key for key in after if key not in before and key[0] in modules]
    assert not changed and not added, (changed, added)
    assert signal.getsignal(signal.SIGINT) is handler
    assert (len(foreach_types), len(torch.serialization._package_registry)) == lengths
    alias.close()
with onebox.open("cpu*2"):
    a = torch.ones(2, 2, device="vgpu:1", requires_grad=True)
    (a @ a).sum().backward()
    print(a.grad.sum().item())
"""


def test_all_sets_restore_pytorch_and_can_be_applied_again() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "16.0"


def test_importing_the_package_replaces_nothing_and_installing_it_is_an_accelerator_without_a_pool() -> None:
    script = """
import signal, torch
def seen():
    engine = torch.autograd.graph._engine_run_backward
    return signal.signal, torch.compile, torch.Generator, engine, torch.Tensor.to, torch.nn.Module._apply
before = seen()
import onebox.vgpu
assert seen() == before
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
onebox.vgpu.install()
print(torch.accelerator.current_accelerator(), torch.accelerator.device_count(), torch.vgpu.is_available())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["vgpu", "0", "False"]), done.stderr
