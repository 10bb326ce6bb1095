"""``cuda`` on virtual devices: what a script may say, and what it sees, on a client without CUDA."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.nn import functional

from onebox.errors import UsageError
from onebox.vgpu.core.tensor import is_virtual

CUDA = torch.device("cuda")
ZERO = torch.device("cuda:0")
ONE = torch.device("cuda:1")
CPU = torch.device("cpu")
LEGACY: Any = torch.cuda
"""With names that no type checker knows."""


pytestmark = pytest.mark.usefixtures("aliased")


# ---- going in


@pytest.mark.feature("Virtual devices: Use devices by the names and functions of torch.cuda")
@pytest.mark.parametrize(
    "make",
    [
        lambda **at: torch.zeros(2, **at),
        lambda **at: torch.full((2,), 3.0, **at),
        lambda **at: torch.arange(3, **at),
        lambda **at: torch.linspace(0, 1, 4, **at),
        lambda **at: torch.eye(2, **at),
        lambda **at: torch.rand(2, 3, **at),
        lambda **at: torch.randint(5, (2,), **at),
        lambda **at: torch.randperm(4, **at),
        lambda **at: torch.normal(0.0, 1.0, (2,), **at),
        lambda **at: torch.tensor([1, 2], **at),
        lambda **at: torch.as_tensor(np.ones(2), **at),
        lambda **at: torch.asarray([1.0, 2.0], **at),
        lambda **at: torch.empty_like(torch.ones(2), **at),
        lambda **at: torch.zeros_like(torch.ones(2, device="cuda:0"), **at),
        lambda **at: torch.tril_indices(2, 2, **at),
        lambda **at: torch.hann_window(4, **at),
        lambda **at: torch.fft.fftfreq(4, **at),
        lambda **at: torch.ones(2).new_zeros(2, **at),
        lambda **at: torch.ones(2, device="cuda:0").new_tensor([1.0], **at),
        lambda **at: torch.ones(2).to(**at),
        lambda **at: torch.ones(2, device="cuda:0").to(**at),
        lambda **at: torch.ones(2).cuda(**at),
        lambda **at: nn.Linear(2, 2, **at).weight,
        lambda **at: nn.Linear(2, 2).to(**at).weight,
        lambda **at: nn.Linear(2, 2, device="meta").to_empty(**at).weight,
        lambda **at: nn.Linear(2, 2).cuda(**at).bias,
    ],
)
@pytest.mark.parametrize(("place", "want"), [("cuda:1", ONE), (ONE, ONE), ("cuda", ZERO), (CUDA, ZERO), (1, ONE)])
def test_devices_are_taken_in_every_form(make: Callable[..., Tensor], place: Any, want: torch.device) -> None:
    made = make(device=place)
    assert made.device == want and is_virtual(made)


def test_the_current_device_is_where_cuda_is() -> None:
    torch.cuda.set_device("cuda:1")
    assert torch.zeros(1, device="cuda").device == torch.ones(1).cuda().device == torch.ones(1).to(CUDA).device == ONE
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0 and torch.tensor(1, device="cuda").device == ZERO
        with torch.cuda.device_of(torch.ones(1, device=ONE)):
            assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 1


def test_default_devices() -> None:
    torch.set_default_device("cuda:1")
    assert torch.get_default_device() == ONE
    assert torch.ones(2).device == torch.tensor([1]).device == nn.Linear(2, 2).weight.device == ONE
    assert torch.ones(2, device="cpu").device == CPU
    torch.set_default_device(None)
    with CUDA:
        assert torch.ones(2).device == torch.get_default_device() == ZERO
    assert torch.ones(2).device == CPU


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_types_of_old_scripts() -> None:
    x = torch.ones(2, 2)
    assert x.type("torch.cuda.FloatTensor").type() == "torch.cuda.FloatTensor"
    assert x.type(LEGACY.DoubleTensor).type() == "torch.cuda.DoubleTensor"
    assert x.cuda(1).type(LEGACY.HalfTensor).device == ONE
    assert x.cuda().type(torch.FloatTensor).type() == "torch.FloatTensor"
    assert x.cuda().type(torch.float64).type() == "torch.cuda.DoubleTensor"
    assert isinstance(x.cuda(), LEGACY.FloatTensor) and not isinstance(x, LEGACY.FloatTensor)
    assert LEGACY.FloatTensor(2, 3).fill_(1.0).sum().item() == 6
    assert LEGACY.LongTensor([[1, 2]]).tolist() == [[1, 2]] and LEGACY.FloatTensor().numel() == 0
    assert LEGACY.FloatTensor(np.ones(2)).dtype == torch.float32
    assert x.cuda().new(2, 3).device == ZERO
    there = x.cuda(1)
    assert [made.device for made in (there.new(2), there.new([1.0]), there.new(), there.new_tensor([1]))] == [ONE] * 4
    assert there.new(2, device=None).device == there.new_tensor([1], device=None).device == ONE
    assert [made.device for made in (there.new(x.cuda()), there.new([1.0], device="cuda:0"))] == [ZERO] * 2
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    try:
        made = torch.ones(1)
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert (made.device, made.dtype, torch.ones(1).device, torch.ones(1).dtype) == (
        ZERO,
        torch.float64,
        CPU,
        torch.float32,
    )


def test_what_is_there_already_is_not_copied() -> None:
    x = torch.ones(2, device="cuda")
    assert x.to("cuda:0") is x and x.cuda() is x and torch.as_tensor(x, device="cuda") is x


def test_devices_that_are_not_there() -> None:
    for wrong in ("cuda:2", torch.device("cuda", 7)):
        with pytest.raises(UsageError, match=r"no device cuda:[27]; the pool has cuda:0 to cuda:1"):
            torch.ones(2, device=wrong)
    with pytest.raises(UsageError, match="no device cuda:5"):
        torch.ones(2).cuda(5)
    with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
        torch.ones(2).cuda("cpu")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):
        torch.ones(2, device="cudda")


# ---- coming out


def test_what_a_tensor_says_of_itself() -> None:
    x = torch.ones(2, device="cuda:1")
    assert x.is_cuda and not x.is_cpu and x.device.type == "cuda" and x.get_device() == 1
    assert x.device in {ONE} and str(x.device) == "cuda:1"
    assert repr(x) == "tensor([1., 1.], device='cuda:1')"
    assert not hasattr(x, "__cuda_array_interface__")
    assert nn.Parameter(x).is_cuda and (x * 2).sum().is_cuda and x.detach().device == x.cpu().cuda(1).device == ONE
    y = x.clone().requires_grad_()
    (y * 3).sum().backward()
    assert y.grad is not None and y.grad.device == ONE and y.grad.tolist() == [3, 3]
    with pytest.raises(TypeError, match="can't convert cuda:1 device type tensor to numpy"):
        x.numpy()


def test_errors_name_devices_as_the_script_does() -> None:
    with pytest.raises(RuntimeError, match=r"at least two devices, cuda:0 and cuda:1!"):
        torch.ones(2, device=ZERO) + torch.ones(2, device=ONE)
    with pytest.raises(RuntimeError, match=r"at least two devices, cpu and cuda:0!"):
        functional.linear(torch.ones(2, 2), torch.ones(2, 2, device="cuda"))


def test_modules_go_there_and_back() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    want = model(torch.ones(2, 3)).tolist()
    moved = model.cuda()
    assert {value.device for value in (*model.parameters(), *model.buffers())} == {ZERO}
    assert torch.allclose(moved(torch.ones(2, 3).cuda()).cpu(), torch.tensor(want), atol=1e-6)
    assert {value.device for value in copy.deepcopy(model).to(1).state_dict().values()} == {ONE}
    assert {value.device for value in model.cpu().state_dict().values()} == {CPU}


def test_the_type_of_a_parameter_makes_parameters() -> None:
    parameter = nn.Linear(2, 2, device="cuda:1").weight
    for data in (torch.ones(2, device="cuda:1"), torch.ones(2)):
        made = type(parameter)(data, requires_grad=False)
        assert isinstance(made, nn.Parameter) and made.device == data.device and not made.requires_grad
    with pytest.raises(AttributeError):
        type(parameter)("wrong")


# ---- files


def saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize(
    ("location", "want"),
    [
        (None, ONE),
        ("cpu", CPU),
        ("cuda", ZERO),
        ("cuda:0", ZERO),
        (torch.device("cuda:0"), ZERO),
        ({"cuda:1": "cuda:0"}, ZERO),
        (lambda storage, location: storage, CPU),
        (lambda storage, location: storage.cuda(0), ZERO),
        (lambda storage, location: location.replace("1", "0") and None, ONE),
    ],
)
def test_saved_tensors_are_loaded_where_they_are_wanted(location: Any, want: torch.device) -> None:
    x = torch.arange(6.0, device="cuda:1").reshape(2, 3).t()
    loaded = saved({"x": x}, map_location=location)["x"]
    assert loaded.device == want and loaded.tolist() == x.tolist()


@pytest.mark.feature("Virtual devices: Save and load tensors of devices")
def test_a_file_of_the_host_is_loaded_onto_a_device(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", map_location="cuda:1", weights_only=True)
    assert {value.device for value in state.values()} == {ONE}
    model.cuda().load_state_dict(state)
    assert model.weight.device == ZERO and model.weight.tolist() == state["weight"].tolist()


@pytest.mark.feature("Virtual devices: Save and load tensors of devices")
def test_a_file_says_cuda_so_that_every_pytorch_can_map_it() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(2, device="cuda:1"), file)
    assert b"cuda:1" in file.getvalue() and b"vgpu" not in file.getvalue()
    assert pickle.loads(pickle.dumps(torch.ones(2, device="cuda:1"))).device == ONE


@pytest.mark.feature("Virtual devices: Save and load tensors of devices")
def test_safetensors_are_loaded_onto_the_current_device(tmp_path: Path) -> None:
    """Not onto the first one, which with a rank for each device may be another rank's."""
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    with torch.cuda.device(1):
        assert load_file(tmp_path / "x.safetensors", device="cuda")["x"].device == ONE
        assert load_file(tmp_path / "x.safetensors", device="cuda:0")["x"].device == ZERO
        assert load_file(tmp_path / "x.safetensors")["x"].device == torch.device("cpu")


def test_safetensors_see_tied_weights(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied().cuda()
    with pytest.raises(RuntimeError, match="Some tensors share memory"):
        save_file(model.state_dict(), tmp_path / "two.safetensors")
    save_model(model, str(tmp_path / "one.safetensors"))
    (stored,) = load_file(tmp_path / "one.safetensors", device="cuda:1").values()
    assert stored.device == ONE
    other = Tied().cuda()
    assert load_model(other, tmp_path / "one.safetensors", device="cuda:0") == (set(), [])
    assert other.head.weight.tolist() == model.head.weight.tolist() == stored.tolist()


# ---- afterwards

AFTERWARDS = """
import onebox, torch
from onebox.vgpu import alias_cuda
with onebox.open("cpu*2", threads=1):
    with alias_cuda():
        torch.cuda.set_device(1)
    print(torch.ones(1).to("vgpu").get_device(), torch.tensor([1.0], device="vgpu").get_device())
"""


def test_the_current_device_is_known_when_cuda_means_it_no_longer() -> None:
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["1", "1"]), done.stderr


# ---- what has nothing to do with a GPU is as without the alias


def numbers_made(start: float) -> Tensor:
    made = torch.tensor(start) + torch.tensor([1.0, 2.0]) + torch.as_tensor([1.0, 2.0])
    made = made + torch.zeros(2) + torch.ones([2]) + torch.full([2], 0.5) + torch.arange(2) + torch.linspace(0, 1, 2)
    return made + torch.zeros_like(made) + made.new_ones([2]) + torch.eye(2)[0] + torch.tensor(1, device="cpu")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_function_on_the_host_is_scripted() -> None:
    assert torch.equal(torch.jit.script(numbers_made)(2.0), numbers_made(2.0))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ["zeros", "tensor", "as_tensor", "arange", "ones_like"])
def test_a_factory_is_pickled_by_its_name(name: str) -> None:
    function = getattr(torch, name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__qualname__ == name


def test_classes_that_stand_for_two_have_the_subclasses_of_both() -> None:
    assert issubclass(type(torch.Generator()), torch.Generator)
    assert issubclass(type(torch.Generator("cuda")), torch.Generator)
    assert issubclass(torch.cuda.Stream, torch.Stream) and not issubclass(int, torch.Stream)


def test_the_properties_of_a_device_have_what_compilers_read() -> None:
    properties: Any = torch.cuda.get_device_properties(0)
    assert properties.gcnArchName == properties.name
    assert properties.warp_size == 32 and properties.max_threads_per_multi_processor >= 1024
    assert not hasattr(properties, "uuid")
    with pytest.raises(AttributeError, match="uuid of a virtual device is not known here; look for it on the machine"):
        properties.uuid  # noqa: B018
    assert copy.deepcopy(properties) == properties


class Wrapped(Tensor):
    """A tensor around another one, as of libraries for quantisation and sharding."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = [arg.inner if isinstance(arg, Wrapped) else arg for arg in args]
        made = func(*bare, **(kwargs or {}))
        return Wrapped(made) if isinstance(made, Tensor) else made


def test_a_subclass_of_tensors_that_wraps_one_of_a_device_has_gradients() -> None:
    parameter = nn.Parameter(Wrapped(torch.ones(2, 2, device="cuda:1")))
    (parameter * 3).sum().backward()
    gradient: Any = parameter.grad
    assert gradient.inner.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert gradient.inner.device == ONE


def test_a_sparse_parameter_has_its_device_and_its_gradient() -> None:
    values = nn.Parameter(torch.tensor([2.0, 3.0], device="cuda:1"))
    places = torch.tensor([[0, 1], [1, 0]], device="cuda:1")
    made = torch.sparse_coo_tensor(places, values, (2, 2), check_invariants=True)
    assert (made.device, made.is_cuda, made.is_sparse) == (ONE, True, True)
    (made.to_dense() * torch.tensor([[1.0, 4.0], [5.0, 1.0]], device="cuda:1")).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [4.0, 5.0]


COMPILED = """
import torch, torch.distributed.optim, torch.testing._internal.common_methods_invocations
x = torch.ones(4, requires_grad=True)
for options in {}, {"mode": "reduce-overhead"}, {"backend": "aot_eager"}:
    torch._dynamo.reset()
    y = torch.compile(lambda x: (x * 2).sin().sum() + torch.tensor([1.0, 2.0]).sum(), **options)(x)
    y.backward()
    print(round(y.item(), 4), round(x.grad.sum().item(), 4))
    x.grad = None
print(torch.export.export(torch.nn.Linear(4, 2), (torch.ones(1, 4),)).module()(torch.ones(1, 4)).shape)
"""


def test_code_on_the_host_is_compiled_and_every_module_of_torch_is_imported_under_onebox_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(COMPILED)
    line = [sys.executable, "-m", "onebox", "run", "--pool", "cpu", "--threads", "1", "script.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["6.6372 -3.3292"] * 3 + ["torch.Size([1, 2])"]
