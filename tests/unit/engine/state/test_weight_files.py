"""Weights in folders as on a hub: what is matched with a model, what is refused before anything is written, and what
is written."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import onebox
from onebox.engine.state.tensor_files import stored_tensors
from onebox.engine.state.weight_files import first_values, write_weights
from onebox.engine.workload.named_state import named_state
from onebox.errors import CheckpointError, UsageError
from onebox.trainer_options import Weights
from onebox.wire import spec_of

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


class Net(nn.Module):
    """A model with tied parameters, batch norm, and a buffer that no state dict has."""

    rates: Tensor

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.register_buffer("rates", torch.arange(3.0), persistent=False)


def weights_of(seed: int = 0) -> dict[str, Tensor]:
    """Return weights as another run has left them."""
    torch.manual_seed(seed)
    found = {
        name: torch.randn_like(tensor) for name, tensor in Net().state_dict().items() if tensor.is_floating_point()
    }
    return found | {"norm.num_batches_tracked": torch.tensor(7), "head.weight": found["table.weight"]}


def folder(path: Path, tensors: dict[str, Tensor], *, several: bool = True) -> Path:
    """Write a folder as on a hub."""
    path.mkdir()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if not several:
        save_file(tensors, path / "model.safetensors")
        return path
    names = sorted(tensors)
    parts = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, path / file)
    places = {name: file for file, own in parts.items() for name in own}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return path


def read(weights: Path | Weights, model: nn.Module) -> dict[str, Tensor]:
    """Return the values of the tensors on the meta device."""
    return dict(first_values(weights, model, named_state(model, None, lambda: 0)))


def on_meta(tied: bool = True) -> Net:
    with onebox.meta_parameters():
        return Net(tied)


@pytest.mark.parametrize("several", [True, False])
def test_values_of_the_meta_device_are_read_and_others_written(tmp_path: Path, several: bool) -> None:
    stored, model = weights_of(), on_meta()
    path = folder(tmp_path / "hub", {**stored, "rates": torch.zeros(3)}, several=several)
    found = read(path, model)
    assert set(found) == {"model.table.weight", "model.norm.weight", "model.norm.bias"}
    for name, tensor in found.items():
        assert torch.equal(tensor, stored[name.removeprefix("model.")])
    assert torch.equal(model.norm.running_mean, stored["norm.running_mean"])  # type: ignore[arg-type]
    assert int(model.norm.num_batches_tracked) == 7  # type: ignore[arg-type]
    assert torch.equal(model.rates, torch.arange(3.0)), "what no state dict has is the model's own"


@pytest.mark.parametrize("name", ["table.weight", "head.weight"])
def test_tied_parameters_have_either_name(tmp_path: Path, name: str) -> None:
    stored = weights_of()
    value = stored["table.weight"]
    tensors = {other: tensor for other, tensor in stored.items() if other not in ("table.weight", "head.weight")}
    assert torch.equal(read(folder(tmp_path / "hub", tensors | {name: value}), on_meta())["model.table.weight"], value)


def test_names_of_peft_and_of_a_part(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored = {"up.weight": torch.randn(3, 2), "head.weight": torch.randn(2, 3), "other.bias": torch.randn(2)}
    path = folder(tmp_path / "hub", stored)

    def of(*names: str) -> nn.Module:
        root = nn.Module()
        for name in names:
            *parts, last = name.split(".")
            part = root
            for key in parts:
                if not hasattr(part, key):
                    part.add_module(key, nn.Module())
                part = getattr(part, key)
            part.register_parameter(last, nn.Parameter(torch.empty(3, 2, device="meta")))
        return root

    wrapped = "base_model.model.up.base_layer.weight"
    copies = "base_model.model.up.original_module.weight", "base_model.model.up.modules_to_save.default.weight"
    skip = ["other.*", "head.*"]
    for model, names in ((of(wrapped), [wrapped]), (of(*copies), copies)):
        found = read(Weights(path, skip=skip), model)
        assert {f"model.{name}" for name in names} == set(found)
        assert all(torch.equal(tensor, stored["up.weight"]) for tensor in found.values())
    assert torch.equal(
        read(Weights(path, "inner", skip), of("inner.up.weight"))["model.inner.up.weight"], stored["up.weight"]
    )
    with pytest.raises(UsageError, match=r"module='outer': the model has no such part; it has inner"):
        read(Weights(path, "outer"), of("inner.up.weight"))


def without(name: str) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda tensors: {n: t for n, t in tensors.items() if n != name})


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], *, index: bool = True) -> None:
    """Write the files of a folder again, changed."""
    places = {}
    for file in (FIRST, SECOND):
        tensors = change(load_file(path / file))
        save_file(tensors, path / file)
        places |= dict.fromkeys(tensors, file)
    if index:
        (path / INDEX).write_text(json.dumps({"weight_map": places}))


def say(**places: str) -> Callable[[Path], None]:
    """Return the change of an index."""

    def change(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        index["weight_map"] |= {name.replace("__", "."): place for name, place in places.items()}
        (path / INDEX).write_text(json.dumps(index))

    return change


def changed(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda tensors: {n: how(t) if n == name else t for n, t in tensors.items()})


def as_float8(path: Path) -> None:
    changed("norm.bias", lambda tensor: tensor.to(torch.float8_e4m3fn))(path)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (without("norm.weight"), r"has nothing for 'model.norm.weight', on the meta device .*to_empty"),
    "unexpected": (say(), r"has 'extra.bias' and 1 more tensor, which the model has not: .* skip=\['extra.bias'\]"),
    "shape": (
        changed("norm.bias", lambda x: x[:3]),
        r"norm.bias in .* has the shape \[3\], and model.norm.bias .* \[4\]",
    ),
    "type": (changed("norm.bias", Tensor.double), r"norm.bias in .* is of float64, and .* of float32: .* model.to\("),
    "unknown type": (as_float8, r"norm.bias in .* is of type F8_E4M3, which cannot be trained with"),
    "tied": (changed("head.weight", lambda x: x + 1), r"different weights for table.weight and head.weight"),
    "no file": (lambda path: (path / FIRST).unlink(), rf"{FIRST} is missing, which {INDEX} names: fetch it again"),
    "cut short": (lambda path: (path / FIRST).write_bytes((path / FIRST).read_bytes()[:-8]), "is cut short"),
    "no safetensors": (lambda path: (path / FIRST).write_bytes(b"x" * 100), "is no safetensors file"),
    "up": (say(norm__bias=f"../hub/{SECOND}"), r"norm.bias is in '\.\./hub/.*': allowed are names"),
    "absolute": (say(norm__bias="/etc/passwd.safetensors"), r"is in '/etc/passwd.safetensors': allowed are names"),
    "windows": (say(norm__bias="..\\x.safetensors"), "allowed are names"),
    "pickle": (say(norm__bias="pytorch_model.bin"), "allowed are names"),
    "elsewhere": (say(norm__bias=SECOND), rf"says that norm.bias is in {SECOND}, and it is not there"),
    "no json": (lambda path: (path / INDEX).write_text("{"), "cannot be read"),
    "no index": (lambda path: (path / INDEX).unlink(), f"has neither model.safetensors nor {INDEX}"),
    "twice": (
        lambda path: save_file(load_file(path / FIRST) | load_file(path / SECOND), path / SECOND),
        f"is in both .*{FIRST} and .*{SECOND}",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path: Path, what: str) -> None:
    change, message = REFUSED[what]
    stored = weights_of()
    if what == "unexpected":
        stored |= {"extra.bias": torch.zeros(1), "extra.weight": torch.zeros(1)}
    path, model = folder(tmp_path / "hub", stored), on_meta()
    if what == "elsewhere":
        assert "norm.bias" in load_file(path / FIRST)
    change(path)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(CheckpointError, match=message):
        read(path, model)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder or safetensors file"):
        read(tmp_path / "none", on_meta())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model.bin there would have to be unpickled, which onebox does not"
    ):
        read(tmp_path, on_meta())
    with pytest.raises(UsageError, match=r"'model.table.weight' and 2 more tensors on the meta device, without values"):
        first_values(None, on_meta(), named_state(on_meta(), None, lambda: 0))
    with pytest.raises(UsageError, match=r"skip='lm_head': allowed is a list of patterns"):
        Weights(tmp_path, skip="lm_head")


def test_links_to_files_elsewhere_are_followed(tmp_path: Path) -> None:
    """The cache of a hub has links to blobs."""
    stored = weights_of()
    path, links = folder(tmp_path / "blobs", stored), tmp_path / "snapshot"
    links.mkdir()
    for file in (FIRST, SECOND, INDEX):
        (links / file).symlink_to(path / file)
    assert torch.equal(read(links, on_meta())["model.norm.bias"], stored["norm.bias"])


def test_what_no_file_has_keeps_its_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored, model = weights_of(), Net()
    del stored["norm.bias"]
    with torch.no_grad():
        model.norm.bias.fill_(3)
    with caplog.at_level(logging.INFO, "onebox"):
        assert read(folder(tmp_path / "hub", stored), model) == {}
    assert "has nothing for 'model.norm.bias': what the model has is kept" in caplog.text
    assert torch.equal(model.norm.bias, torch.full((4,), 3.0))
    assert torch.equal(model.table.weight, stored["table.weight"])


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = folder(tmp_path / "hub", weights_of(), several=False)
    model = on_meta()
    values = first_values(path, model, named_state(model, None, lambda: 0))
    save_file({name: tensor.double() for name, tensor in weights_of().items()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is another file by now"):
        _ = values["model.norm.bias"]
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read any more"):
        _ = values["model.norm.bias"]


def test_parameters_of_other_threads_have_values() -> None:
    made: list[nn.Module] = []
    with onebox.meta_parameters():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        frozen = nn.Module()
        frozen.register_parameter("w", nn.Parameter(torch.ones(2), requires_grad=False))
        lazy = nn.LazyLinear(3)
    assert not next(made[0].parameters()).is_meta
    assert frozen.w.is_meta and not frozen.w.requires_grad  # type: ignore[union-attr]
    assert nn.parameter.is_lazy(lazy.weight) and not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("shard_bytes", [1 << 20, 100, 1])
def test_written_weights_are_read_again(tmp_path: Path, shard_bytes: int) -> None:
    stored = {name: tensor for name, tensor in weights_of().items() if name != "head.weight"}
    specs = {name: spec_of(tensor) for name, tensor in stored.items()}

    def elements(names: Sequence[str]) -> list[Tensor]:
        return [stored[name] for name in names]

    path = tmp_path / "new" / "hub"
    write_weights(path, specs, elements, shard_bytes=shard_bytes)
    files = sorted(file.name for file in path.iterdir())
    if shard_bytes > 100:
        assert files == ["model.safetensors"]
    else:
        assert files == [f"model-{n:05d}-of-{len(files) - 1:05d}.safetensors" for n in range(1, len(files))] + [INDEX]
        index = json.loads((path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(spec.size_bytes for spec in specs.values())
        for name, file in index["weight_map"].items():
            assert name in stored_tensors(path / file)
    read_again: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        own = load_file(file)
        assert len(own) == 1 or sum(tensor.nbytes for tensor in own.values()) <= shard_bytes
        read_again |= own
    assert all(torch.equal(read_again[name], tensor) for name, tensor in stored.items())
    assert torch.equal(read(path, on_meta())["model.norm.bias"], stored["norm.bias"])
    with pytest.raises(UsageError, match="has weights already"):
        write_weights(path, specs, elements, shard_bytes=shard_bytes)


def test_what_fails_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    def elements(names: Sequence[str]) -> list[Tensor]:
        raise onebox.OneboxError("a worker was lost")

    with pytest.raises(onebox.OneboxError, match="lost"):
        write_weights(tmp_path / "hub", {"w": spec_of(torch.ones(3))}, elements, shard_bytes=1)
    assert list((tmp_path / "hub").iterdir()) == []


# ---- frozen weights as integers


def quantised(layer: nn.Module) -> nn.Module:
    model = nn.ModuleDict({"first": nn.Linear(32, 4), "second": layer.requires_grad_(False)})
    onebox.quantize_frozen(model, "int4", group=16)
    return model


def test_codes_and_scales_follow_from_the_weight_in_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = quantised(nn.Linear(32, 4))
    stored = {name: tensor for name, tensor in model.state_dict().items() if "second" not in name}
    weight = torch.randn(4, 32)
    path = folder(tmp_path / "hub", {**stored, "second.weight": weight, "second.bias": torch.ones(4)})
    with onebox.meta_parameters():
        empty = quantised(nn.Linear(32, 4))
    codes, scales = empty["second"].quantized(weight)  # type: ignore[index, operator]
    for _ in range(2):  # each access reads anew, in any order
        found = read(path, empty)
        assert torch.equal(found["model.second.scales"], scales)
        assert torch.equal(found["model.second.codes"], codes)
        assert torch.equal(found["model.second.bias"], torch.ones(4))
    assert not read(path, model)
    assert torch.equal(model["second"].codes, codes)  # type: ignore[index, arg-type]


def test_a_weight_that_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    with onebox.meta_parameters():
        empty = quantised(nn.Linear(32, 4, bias=False))
    rest = {"first.weight": torch.zeros(4, 32), "first.bias": torch.zeros(4)}
    for number, (weight, message) in enumerate(
        [
            (
                torch.zeros(4, 16),
                r"second.weight in .* has the shape \[4, 16\], and second.weight in the model \[4, 32\]",
            ),
            (
                torch.zeros(4, 32, dtype=torch.int32),
                r"second.weight in .* is of int32, and second.weight in the model of f",
            ),
        ]
    ):
        path = folder(tmp_path / f"hub{number}", {**rest, "second.weight": weight})
        with pytest.raises(CheckpointError, match=message):
            read(path, empty)


# ---- what changes meanwhile


def test_a_file_that_has_been_replaced_is_not_read(tmp_path: Path) -> None:
    path = folder(tmp_path / "hub", weights_of(), several=False)
    found = first_values(path, (model := on_meta()), named_state(model, None, lambda: 0))
    assert torch.equal(found["model.table.weight"], weights_of()["table.weight"])
    folder(tmp_path / "other", weights_of(1), several=False)
    (tmp_path / "other" / "model.safetensors").replace(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is another file by now"):
        _ = found["model.table.weight"]


def test_a_parameter_that_two_modules_share_is_one_on_the_meta_device() -> None:
    class Holder(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    with onebox.meta_parameters():
        shared = nn.Parameter(torch.ones(3))
        one, other = Holder(shared), Holder(shared)
    assert one.weight is other.weight
    assert one.weight.is_meta
