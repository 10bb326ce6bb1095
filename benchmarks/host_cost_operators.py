"""The host's time for each operator of a program: interpreted, replayed as a graph, and by plain PyTorch.

The program is a training step of Hugging Face's GPT-2 with 12 layers whose matrices have a few elements, so that
kernels have almost nothing to do. The device of the graph is a stand-in whose replays do nothing: what is left is the
host's part, with the check of addresses and the copies of inputs and outputs. All sides run in turn; the time is that
of the thread, which others on the machine disturb little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from common import show, spread
from torch import Tensor, nn
from torch.nn import functional

from onebox.graph import NamedProgram, Phase, Port, TracedModel
from onebox.graph.capture.export import capture
from onebox.worker.accelerator import HostAccelerator
from onebox.worker.programs import interpreter
from onebox.worker.programs.graphs import GraphMemory
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress

LAYERS, WIDTH, WORDS, TOKENS = 12, 8, 16, 4

ROUNDS, WARM = 60, 5

CPU = torch.device("cpu")

_Made = TypeVar("_Made")


class _NoKernels:
    size_bytes = 0

    def replay(self, seeds: Sequence[int]) -> None:
        """Launch nothing."""


class GraphDevice(HostAccelerator):
    """A stand-in for a device with graphs: its captures run once, its replays do nothing."""

    graphs = True

    def capture(self, work: Callable[[Callable[[], None]], _Made], draws: int) -> tuple[Any, _Made]:
        return _NoKernels(), work(lambda: None)


class Side:
    """Forward and backward, as a worker runs them.

    Args:
        programs: The programs.
        given: What they read of the model, and the batch.
        graphs: Runs them as graphs, where it can.
    """

    def __init__(
        self, programs: Sequence[NamedProgram], given: dict[Port, Tensor], graphs: GraphMemory | None = None
    ) -> None:
        self._programs = [(named, CompiledProgram(named.program, CPU)) for named in programs]
        self._given = given
        self._graphs = graphs

    def seconds(self) -> float:
        """Run them, and return the seconds of the programs alone."""
        state, total, progress = dict(self._given), 0.0, WorkerProgress()
        for named, tape in self._programs:
            inputs, made = [state[port] for port in named.inputs], None
            begin = time.thread_time()
            if self._graphs is not None:
                made = self._graphs.run(tape, inputs, lambda position: 0, progress, lambda: 1 << 40)
            if made is None:
                made = tape.run(inputs, lambda position: None, progress)
            total += time.thread_time() - begin
            state.update(zip(named.outputs, made, strict=True))
        return total


class Plain:
    """The same step by PyTorch itself."""

    def __init__(self, model: nn.Module, words: Tensor) -> None:
        self._model = model
        self._words = words

    def seconds(self) -> float:
        """Run it, and return its seconds."""
        begin = time.thread_time()
        with torch.inference_mode(False):
            loss_of(self._model(self._words), self._words).backward()
        total = time.thread_time() - begin
        self._model.zero_grad()
        return total


def gpt2() -> nn.Module:
    """Return GPT-2 with the layers of its small size, whose matrices have a few elements."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def loss_of(outputs: Any, words: Tensor) -> Tensor:
    """Return the cross entropy of logits [B, T, words]."""
    return functional.cross_entropy(outputs.logits.flatten(0, 1), words.flatten())


def operator_costs() -> dict[str, object]:
    """Measure, show a table, and return the entries of the report."""
    torch.set_num_threads(1)
    model, words = gpt2(), torch.randint(WORDS, (1, TOKENS))
    traced = TracedModel(capture(model, loss_of, (words, words)), backward=True).divide()
    programs = [traced.phases[Phase(0, kind)] for kind in ("F", "B")]
    given = {Port("parameter", name): tensor.detach() for name, tensor in model.named_parameters(prefix="model")}
    given |= {Port("buffer", name): tensor for name, tensor in model.named_buffers(prefix="model")}
    given |= {Port("constant", name): tensor for name, tensor in traced.constants.items()}
    given |= {Port("leaf", place): words for place in range(2)} | {Port("weight", 0): torch.tensor(1.0)}
    count = sum(len(named.program.operators) for named in programs)
    with torch.inference_mode():
        with mock.patch.object(interpreter, "fastest", lambda call, args, keywords: call):
            overloads = Side(programs, given)
        graphs = GraphMemory(GraphDevice(CPU))
        sides = {
            "interpreted": Side(programs, given),
            "interpreted, by overload": overloads,
            "replayed": Side(programs, given, graphs),
            "plain PyTorch": Plain(model, words),
        }
        found: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(WARM + ROUNDS):
            for name, side in sides.items():
                micros = side.seconds() / count * 1e6
                found[name] += [micros] * (number >= WARM)
    if not graphs.replays:
        raise RuntimeError(f"no program was captured: {dict(graphs.refusals)}")
    rows = [[name, spread(values, 2)] for name, values in found.items()]
    show(f"Host time of an operator, µs; {count} operators, {ROUNDS} rounds", ["side", "median (least to most)"], rows)
    median = {name: round(statistics.median(values), 3) for name, values in found.items()}
    return {
        "us_per_operator": median["interpreted"],
        "us_per_operator_overload": median["interpreted, by overload"],
        "us_per_operator_graph": median["replayed"],
        "us_per_operator_plain": median["plain PyTorch"],
        "us_least": {name: round(min(values), 3) for name, values in found.items()},
        "operators": count,
    }
