"""Sensible calls of every operator that a worker runs, in the form in which they come from a client.

Most are recorded while PyTorch's own operator database runs its samples, forward and backward, and while models and
optimizers take a step. Overloads that nobody called get the arguments of their siblings, by name; for the rest random
arguments that fit the schema are tried. As this takes minutes, the calls are kept in a file.

python operator_calls.py FILE PROCESSES    makes the file
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from guarded_memory import Image, ordinary, span_of
from msgspec import Struct
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onebox.errors import WireError
from onebox.wire import (
    DTYPES,
    Complex,
    DType,
    GeneratorArgument,
    LayoutArgument,
    Many,
    MemoryFormat,
    OwnDevice,
    SlotArgument,
    Value,
    dtype_name,
    overload,
)
from onebox.worker.programs.arguments import constant
from onebox.worker.sandbox.allow_list import EAGER, pinned_names

KEPT = 10
"""Calls of an operator, whose arguments are of different kinds."""

_LARGEST = 2048
"""Most elements of a tensor."""

_TRIALS = 300
_SAMPLES = 10
_ITEM_S = 5.0
"""Processor time of one operator of the database, or of all trials of one."""

_CPU = torch.device("cpu")


class Call(Struct, frozen=True, array_like=True):
    """A call of an operator.

    Args:
        name: The operator.
        args: Its positional arguments; slot ``i`` is tensor ``i``.
        kwargs: Its keyword arguments, likewise.
        images: Its tensors.
    """

    name: str
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    images: tuple[Image, ...]


class _Unfit(Exception):
    """An argument that no client can send, or one too large."""


# ---- conversion


def encode(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """Return a call as a client would send it; ``None`` if it could not."""
    images: list[Image] = []
    places: dict[int, int] = {}

    def item(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in places:
                places[id(value)] = len(images)
                images.append(image_of(value))
            return SlotArgument(places[id(value)])
        if isinstance(value, complex):
            return Complex(value.real, value.imag)
        if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 63:
            raise _Unfit
        if value is None or isinstance(value, bool | int | float):
            return value
        raise _Unfit

    def argument(value: Any) -> Value:
        if isinstance(value, torch.dtype):
            return DType(dtype_name(value))
        if isinstance(value, torch.device):
            return OwnDevice()
        if isinstance(value, torch.layout) and value == torch.strided:
            return LayoutArgument()
        if isinstance(value, torch.memory_format):
            return MemoryFormat(str(value).removeprefix("torch."))
        if isinstance(value, torch.Generator):
            return GeneratorArgument(0)
        if isinstance(value, list | tuple):
            return Many(tuple(map(item, value)))
        return value if isinstance(value, str) else item(value)

    try:
        named = {key: argument(value) for key, value in kwargs.items()}
        return Call(name, tuple(map(argument, args)), named, tuple(images))
    except (_Unfit, WireError, RuntimeError, NotImplementedError):
        return None


def image_of(tensor: Tensor) -> Image:
    """Return the image of a tensor.

    Raises:
        _Unfit: It is too large, or not of dense memory.
    """
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise _Unfit
    tensor = tensor.detach().resolve_conj().resolve_neg()
    strides = tensor.stride()
    span = span_of(tensor.shape, strides)
    if span > _LARGEST or tensor.numel() > _LARGEST:
        raise _Unfit
    if not span:
        return Image(dtype_name(tensor.dtype), tuple(tensor.shape), strides, b"")
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset()).contiguous()
    return Image(dtype_name(tensor.dtype), tuple(tensor.shape), strides, flat.view(torch.uint8).numpy().tobytes())


def python_arguments(call: Call, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call as PyTorch takes them."""

    def convert(value: Any) -> Any:
        if isinstance(value, SlotArgument):
            return tensors[value.index]
        if isinstance(value, Many):
            return [convert(one) for one in value.items]
        if isinstance(value, GeneratorArgument):
            return torch.default_generator
        return constant(value, _CPU)

    return [convert(value) for value in call.args], {key: convert(value) for key, value in call.kwargs.items()}


def run_directly(call: Call, tensors: Sequence[Tensor]) -> Any:
    """Call the operator itself."""
    args, kwargs = python_arguments(call, tensors)
    return overload(call.name)(*args, **kwargs)


# ---- recorded calls


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.dim(), value.numel() == 0
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value[:3]))
    return value if isinstance(value, bool | str | None) else type(value)


class Recorder(TorchDispatchMode):
    """Keeps the calls of operators that a worker runs.

    Args:
        wanted: Their names.
    """

    def __init__(self, wanted: Iterable[str]) -> None:
        super().__init__()
        self.wanted = frozenset(wanted)
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self._kinds: set[Any] = set()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = self.new(func, args, kwargs)  # before it runs: it may write to its arguments
        result = func(*args, **kwargs)
        if call is not None:
            self.calls[call.name].append(call)
        return result

    def new(self, func: OpOverload, args: Any, kwargs: Any) -> Call | None:
        """Return a call if it is of another kind than those that are kept."""
        name = str(func)
        if name not in self.wanted or len(self.calls[name]) >= KEPT:
            return None
        kind = name, _kind(args), tuple((key, _kind(value)) for key, value in kwargs.items())
        if kind in self._kinds:
            return None
        self._kinds.add(kind)
        return encode(name, args, kwargs)


def recorded_in_database(wanted: Iterable[str], processes: int) -> list[Call]:
    """Return calls that samples of PyTorch's operator database make."""
    from torch.testing._internal import common_methods_invocations as database

    foreach = [getattr(database, name, []) for name in dir(database) if re.fullmatch(r"foreach_\w+_op_db", name)]
    recorder = Recorder(wanted)

    def record(op: Any) -> Iterator[Call]:
        supported = op.supported_dtypes("cpu")
        chosen = [one for one in (torch.float32, torch.int64, torch.complex64, torch.bool) if one in supported][:3]
        before = {name: len(calls) for name, calls in recorder.calls.items()}
        for dtype in chosen:
            with contextlib.suppress(Exception):
                _record_samples(recorder, op, dtype)
        for name, calls in recorder.calls.items():
            yield from calls[before.get(name, 0) :]

    return in_children(list(itertools.chain(database.op_db, *foreach)), record, processes)


def _record_samples(recorder: Recorder, op: Any, dtype: torch.dtype) -> None:
    backward = bool(op.supports_autograd) and dtype.is_floating_point
    base = (op.aten_name or op.name).split(".")[-1]
    composite = [name for name in recorder.wanted if name.split(".")[1] == base]
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=backward), _SAMPLES):
        with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError, IndexError), recorder:
            made = op(sample.input, *sample.args, **sample.kwargs)
            if backward:
                _backward(made)
        for name in composite:
            if recorder.calls[name]:
                continue
            with contextlib.suppress(Exception), torch.no_grad():
                operator = overload(name)
                call = encode(name, (sample.input, *sample.args), sample.kwargs)
                operator(sample.input, *sample.args, **sample.kwargs)
                if call is not None:
                    recorder.calls[name].append(call)


def _backward(made: Any) -> None:
    targets = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if targets:
        torch.autograd.backward(targets, [torch.ones_like(target) for target in targets])


def record_examples(recorder: Recorder) -> None:
    """Run models and optimizers whose operators the database does not have, or has in few forms."""
    torch.manual_seed(0)
    for example in _EXAMPLES:
        with recorder:
            _backward(example())


def _bag(mode: str, **options: Any) -> Any:
    bag = nn.EmbeddingBag(10, 3, mode=mode, **options)
    indices, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 2, 2])
    weights = torch.rand(6, requires_grad=True) if mode == "sum" else None
    return bag(indices, offsets, weights)


def _steps(kind: Any, **options: Any) -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = kind(parameters, lr=0.1, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()


def _sequences(kind: Any, **options: Any) -> Any:
    return kind(4, 3, num_layers=2, **options)(torch.randn(5, 2, 4))[0]


def _sobol() -> None:
    torch.quasirandom.SobolEngine(3, scramble=True, seed=1).draw(4)
    engine = torch.quasirandom.SobolEngine(2)
    engine.draw(3)
    engine.fast_forward(2)
    engine.draw(1)


def _ctc(lengths: Any) -> Any:
    scores = torch.randn(6, 2, 4, requires_grad=True).log_softmax(2)
    return nn.functional.ctc_loss(scores, torch.tensor([[1, 2, 1], [3, 1, 2]]), *lengths)


def _segments(reduce: str, **options: Any) -> Any:
    return torch.segment_reduce(torch.rand(6, 2, dtype=torch.float64, requires_grad=True), reduce, **options)


def _pooled(kind: str, dimensions: int) -> Any:
    x = torch.randn(1, 2, *(6,) * dimensions, requires_grad=True)
    functional = nn.functional
    if kind == "fractional":
        return getattr(functional, f"fractional_max_pool{dimensions}d")(x, 2, output_size=2)
    if kind == "unpool":
        pooled, indices = getattr(functional, f"max_pool{dimensions}d")(x, 2, return_indices=True)
        return getattr(functional, f"max_unpool{dimensions}d")(pooled, indices, 2)
    return getattr(functional, f"{kind}_pool{dimensions}d")(x, 2)


def _statistics() -> Any:
    x = torch.randn(4, 3, 2)
    mean, variance, count = torch.zeros(3), torch.ones(3), torch.ones(3)
    torch.ops.aten.batch_norm_update_stats(x, mean, variance, 0.1)
    torch.ops.aten.native_batch_norm(x, count, mean, mean.clone(), variance.clone(), True, 0.1, 1e-5)
    return nn.BatchNorm1d(3)(x)


def _compressed_indices() -> None:
    torch.ops.aten._convert_indices_from_coo_to_csr(torch.tensor([0, 0, 1, 2]), 3)
    torch.ops.aten._convert_indices_from_csr_to_coo(torch.tensor([0, 2, 3, 4]), torch.tensor([0, 1, 1, 0]))


def _mkldnn_rnn() -> None:
    weights = torch.randn(12, 4), torch.randn(12, 3), torch.randn(12), torch.randn(12)
    torch.ops.aten.mkldnn_rnn_layer(
        torch.randn(5, 2, 4), *weights, torch.randn(1, 2, 3), torch.randn(1, 2, 3),
        False, [], 2, 3, 1, True, False, False, False,
    )  # fmt: skip


def _weight_norm() -> Any:
    v, g = torch.randn(4, 3, requires_grad=True), torch.randn(4, 1, requires_grad=True)
    return torch._weight_norm(v, g, 0)


_EXAMPLES: tuple[Callable[[], Any], ...] = (
    *(functools.partial(_bag, mode) for mode in ("sum", "mean", "max")),
    functools.partial(_bag, "sum", include_last_offset=True, padding_idx=2),
    functools.partial(_bag, "mean", scale_grad_by_freq=True),
    *(
        functools.partial(_steps, kind, **options)
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
        for options in ({"fused": True}, {"foreach": True}, {"foreach": False})
    ),
    functools.partial(_steps, torch.optim.SGD, momentum=0.9, fused=True),
    functools.partial(_steps, torch.optim.Adam, amsgrad=True, fused=True),
    *(functools.partial(_sequences, kind, **options) for kind in (nn.LSTM, nn.GRU, nn.RNN) for options in (
        {}, {"bidirectional": True})),
    _sobol,
    functools.partial(_ctc, ([6, 5], [3, 2])),
    functools.partial(_ctc, (torch.tensor([6, 5]), torch.tensor([3, 2]))),
    *(functools.partial(_segments, reduce, lengths=torch.tensor([2, 1, 3])) for reduce in ("sum", "max", "mean")),
    functools.partial(_segments, "sum", offsets=torch.tensor([0, 2, 6])),
    *(functools.partial(_pooled, kind, dimensions) for dimensions in (1, 2, 3) for kind in (
        "max", "avg", "adaptive_max", "adaptive_avg", "unpool")),
    *(functools.partial(_pooled, "fractional", dimensions) for dimensions in (2, 3)),
    _statistics,
    _compressed_indices,
    _mkldnn_rnn,
    _weight_norm,
)  # fmt: skip
"""Also the shortest way to the operators that a short run is about."""


# ---- calls of siblings


def _root(name: str) -> str:
    base = name.split(".")[1]
    if not base.startswith("__"):
        base = base.rstrip("_")
    return re.sub(r"(_functional|_copy|_legit|_no_training)$", "", base)


def by_name(call: Call) -> dict[str, Value]:
    """Return the arguments of a call by the names of its operator's schema."""
    names = [argument.name for argument in overload(call.name)._schema.arguments]
    return dict(zip(names, call.args, strict=False)) | call.kwargs


def derived(name: str, siblings: Sequence[Call]) -> Iterator[Call]:
    """Yield calls with the arguments of calls of other overloads that have the same names."""
    schema = overload(name)._schema
    outs = [argument.name for argument in schema.arguments if argument.is_out]
    for sibling in siblings:
        named = {key: value for key, value in by_name(sibling).items() if key not in outs}
        images = list(sibling.images)
        if outs:
            images += _result_images(sibling, len(outs))
            named |= {key: SlotArgument(len(sibling.images) + place) for place, key in enumerate(outs)}
        call = _assembled(name, named, tuple(images))
        if call is not None:
            yield call


def _result_images(call: Call, count: int) -> list[Image]:
    """Return images for the results of a call, empty ones if it has others."""
    with contextlib.suppress(Exception):
        made = tree_leaves(run_directly(call, [ordinary(image) for image in call.images]))
        if len(made) == count:
            return [image_of(one) for one in made]
    return [Image("float32", (0,), (1,), b"")] * count


def _assembled(name: str, named: dict[str, Value], images: tuple[Image, ...]) -> Call | None:
    """Return a call with arguments by name; ``None`` if one is missing."""
    args: list[Value] = []
    kwargs: dict[str, Value] = {}
    for argument in overload(name)._schema.arguments:
        given = argument.name in named
        if not given and not argument.has_default_value():
            return None
        if argument.kwarg_only:
            if given:
                kwargs[argument.name] = named[argument.name]
        else:
            args.append(named[argument.name] if given else _default(argument.default_value, str(argument.real_type)))
    return Call(name, tuple(args), kwargs, images)


def _default(value: Any, kind: str) -> Value:
    if isinstance(value, list | tuple):
        return Many(tuple(value))
    if "ScalarType" in kind or "Layout" in kind or "Device" in kind or "MemoryFormat" in kind:
        return None
    return value


# ---- random arguments

_THEMES = ((4,), (2, 3), (3, 3), (2, 3, 4), (1, 2, 4, 4), (1, 2, 3, 4, 4), ())
_TEXTS = (
    "sum", "mean", "amax", "amin", "prod", "max", "min", "none", "constant", "reflect", "replicate", "circular",
    "trunc", "floor", "valid", "same", "backward", "ortho", "tanh", "L", "U", "left", "ij", "complete", "",
    "bilinear", "relu", "gesvd",
)  # fmt: skip
_DTYPES = (*("float32",) * 3, "float64", *("int64",) * 2, "bool", "complex64", "bfloat16", "uint8", "int32")
_INDEX = re.compile(r"ind(ex|ices)|offset|target|length|count|bins|bag|crow|rows|sequence|labels|pivots|step")


def random_call(name: str, rng: random.Random) -> Call:
    """Return a call whose arguments have the types of the schema, and random values."""
    theme, dtype = rng.choice(_THEMES), rng.choice(_DTYPES)
    images: list[Image] = []

    def tensor(argument_name: str) -> SlotArgument:
        shape: tuple[int, ...] = theme
        if rng.random() < 0.3:
            shape = rng.choice(((), (1,), (2,), (3,), (4,), theme[:1], theme[1:2], theme[1:], rng.choice(_THEMES)))
        kind = dtype if rng.random() < 0.85 else rng.choice(_DTYPES)
        if _INDEX.search(argument_name) and rng.random() < 0.8:
            kind = rng.choice(("int64", "int64", "int32"))
        if "mask" in argument_name and rng.random() < 0.6:
            kind = "bool"
        images.append(random_image(rng, kind, shape))
        return SlotArgument(len(images) - 1)

    def scalar(kind: str, argument_name: str) -> Value:
        if kind in ("SymInt", "int"):
            return rng.choice((0, 1, -1) if "dim" in argument_name else (1, 1, 2, 3, 0))
        if kind == "float":
            return rng.choice((0.5, 1.0, 1e-5, 0.0, 2.0))
        if kind == "bool":
            return rng.random() < 0.5
        if kind in ("number", "Scalar"):
            return rng.choice((1, 2, 0.5, 0))
        other = {
            "ScalarType": DType(rng.choice(_DTYPES)), "Layout": LayoutArgument(), "Device": OwnDevice(),
            "MemoryFormat": MemoryFormat(rng.choice(("contiguous_format", "preserve_format"))),
            "Generator": GeneratorArgument(0), "str": rng.choice(_TEXTS),
        }  # fmt: skip
        return tensor(argument_name) if kind == "Tensor" else other.get(kind)

    def value(argument: Any) -> Value:
        kind = str(argument.real_type)
        optional = re.fullmatch(r"Optional\[(.*)\]", kind)
        if optional:
            kind = optional[1]
            if rng.random() < (0.9 if kind in ("Generator", "Layout", "Device", "MemoryFormat") else 0.4):
                return None
        listed = re.fullmatch(r"List\[(.*)\]", kind)
        if not listed:
            return scalar(kind, argument.name)
        kind = (re.fullmatch(r"Optional\[(.*)\]", listed[1]) or listed)[1]
        if "size" in argument.name and kind in ("SymInt", "int") and rng.random() < 0.5:
            return Many(theme)
        length = argument.N or rng.choice((1, 2, 2, 3))
        return Many(tuple(scalar(kind, argument.name) for _ in range(length)))  # type: ignore[misc]

    args: list[Value] = []
    kwargs: dict[str, Value] = {}
    for argument in overload(name)._schema.arguments:
        if argument.kwarg_only:
            if not argument.has_default_value() or rng.random() < 0.3:
                kwargs[argument.name] = value(argument)
        else:
            args.append(value(argument))
    return Call(name, tuple(args), kwargs, tuple(images))


def random_image(rng: random.Random, dtype: str, shape: tuple[int, ...]) -> Image:
    """Return the image of a dense tensor of small numbers, which are valid indices as often as not."""
    count = 1
    for size in shape:
        count *= size
    kind = DTYPES[dtype]
    if kind.is_floating_point or kind.is_complex:
        values = torch.tensor([rng.uniform(0.1, 2.0) for _ in range(count)]).to(kind)
    else:
        values = torch.tensor([rng.randrange(2 if dtype == "bool" else 3) for _ in range(count)]).to(kind)
    strides = [1] * len(shape)
    for place in reversed(range(len(shape) - 1)):
        strides[place] = strides[place + 1] * max(1, shape[place + 1])
    return Image(dtype, shape, tuple(strides), values.view(torch.uint8).numpy().tobytes() if count else b"")


# ---- all of them

Attempt = Callable[[Call], bool]
"""Runs a call; returns whether it succeeded."""


def directly(call: Call) -> bool:
    """Run a call without a worker."""
    try:
        run_directly(call, [ordinary(image) for image in call.images])
    except Exception:
        return False
    return True


def base_calls(names: Iterable[str], *, database: bool, processes: int = 1) -> dict[str, list[Call]]:
    """Return calls of each operator, such as succeed where they are known.

    Args:
        names: The operators.
        database: Whether to run PyTorch's operator database, which takes a minute and more.
        processes: Number of processes that run it.
    """
    warnings.simplefilter("ignore")
    names = frozenset(names)
    recorder = Recorder(pinned_names(EAGER) | names)
    record_examples(recorder)
    recorded = recorder.calls
    if database:
        for call in recorded_in_database(recorder.wanted, processes):
            recorded[call.name].append(call)
    siblings: dict[str, list[Call]] = defaultdict(list)
    for calls in recorded.values():
        for call in calls:
            siblings[_root(call.name)].append(call)
    unknown = sorted(name for name in names if not recorded.get(name))
    for call in in_children(unknown, lambda name: _tried(name, siblings[_root(name)]), processes):
        recorded[call.name].append(call)
    rng = random.Random(0)
    ordered = sorted(names)  # so that a seed gives the same calls in every process
    return {name: rng.sample(calls, min(KEPT, len(calls))) for name in ordered if (calls := recorded.get(name))} | {
        name: _random_calls(name) for name in ordered if not recorded.get(name)
    }


def _tried(name: str, siblings: Sequence[Call]) -> Iterator[Call]:
    """Yield calls that succeed."""
    count = 0
    rng = random.Random(name)
    for call in itertools.chain(derived(name, siblings), (random_call(name, rng) for _ in range(_TRIALS))):
        if directly(call):
            yield call
            count += 1
            if count >= KEPT // 2:
                return


def in_children(items: Sequence[Any], work: Callable[[Any], Iterator[Call]], processes: int) -> list[Call]:
    """Return what a function yields for each item, in child processes: one that crashes or takes long is left out."""
    shares = [range(share, len(items), processes) for share in range(min(processes, len(items)))]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in shares]
        children = [_child(items, share, work, file) for share, file in zip(shares, files, strict=True)]
        found: list[Call] = []
        for number, file in enumerate(files):
            while True:
                _, status = os.waitpid(children[number], 0)
                calls, begun = _records(file)
                found += calls
                if not status or begun is None:
                    break
                shares[number] = shares[number][begun + 1 :]  # go on behind the item that it ended in
                file.truncate(0)
                children[number] = _child(items, shares[number], work, file)
    return found


def _child(items: Sequence[Any], share: range, work: Callable[[Any], Iterator[Call]], file: IO[bytes]) -> int:
    """Start a child process that works on a share of the items; return its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    with contextlib.suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        file.seek(0)
        for place, item in enumerate(share):
            signal.setitimer(signal.ITIMER_PROF, _ITEM_S)
            signal.setitimer(signal.ITIMER_REAL, 20 * _ITEM_S)
            _write(file, place)
            for call in work(items[item]):
                _write(file, call)
        status = 0
    os._exit(status)


def _write(file: IO[bytes], record: Call | int) -> None:
    data = msgspec.msgpack.encode(record)
    os.write(file.fileno(), len(data).to_bytes(4, "little") + data)


def _records(file: IO[bytes]) -> tuple[list[Call], int | None]:
    """Return the calls in a child's file, and the place of the last item that it began."""
    file.seek(0)
    data = file.read()
    calls: list[Call] = []
    begun, at = None, 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        record = msgspec.msgpack.decode(data[at + 4 : end], type=Call | int)
        if isinstance(record, int):
            begun = record
        else:
            calls.append(record)
        at = end
    return calls, begun


def load(path: Path, names: Iterable[str]) -> dict[str, list[Call]]:
    """Return the calls of some operators from a file, random ones of those that it does not have."""
    kept = msgspec.msgpack.decode(path.read_bytes(), type=dict[str, list[Call]])
    return {name: kept.get(name) or _random_calls(name) for name in names}


def _random_calls(name: str) -> list[Call]:
    rng = random.Random(name)
    return [random_call(name, rng) for _ in range(3)]


def main() -> None:
    """Make the file."""
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    made = path.with_suffix(f".{os.getpid()}")
    made.write_bytes(msgspec.msgpack.encode(base_calls(pinned_names(EAGER), database=True, processes=int(sys.argv[2]))))
    made.rename(path)


if __name__ == "__main__":
    main()
