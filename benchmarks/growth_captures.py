"""How does the time of a capture grow with the layers of a model, and how many captures do many lengths take?

Models are transformer encoders of equal layers. Each row is a process of its own, one thread, and its times are
processor time: of the trace (and of PyTorch's part in it), of the model made of it, and of its programs as one stage
and with a stage for each segment. Memory is the peak of the process over that before the capture, with the garbage
collector off. Targets: 200 layers in 20 s; a peak of at most the largest tensor; at most 4 captures for 100 lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import commit, finish, machine, show
from lengths import CLASSES, SAMPLES, WORDS, Encoder, counted, plain_step, sgd
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.graph import TRACING, TracedModel
from onebox.graph.capture import joint
from onebox.graph.capture.export import capture
from onebox.graph.capture.repeated import layer_trace

LAYERS = (12, 50, 100, 200)
WIDE_LAYERS, WIDE_WIDTH = 6, 2048
"""A model of 0.3 billion parameters, whose memory is seen beside what a process takes anyway."""

WIDTH, LENGTH, HEADS = 32, 16, 4
LENGTHS = 100
WAIT_S = 900.0
"""Most seconds of a process of a row."""


class Stack(nn.Module):
    """Equal layers of a transformer encoder between an embedding and a classifier."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words_BT: Tensor) -> Tensor:
        """Classify sentences."""
        return self.head(self.body(self.embed(words_BT)).mean(1))


def batch(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Return a batch of sentences of some words, the same each time."""
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(1, WORDS, (SAMPLES, length), generator=draw)
    return words, torch.randint(0, CLASSES, (SAMPLES,), generator=draw)


def memory_bytes(name: str) -> int:
    """Return the memory of this process: ``VmRSS``, or ``VmHWM`` for its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@contextmanager
def times_of(took_s: list[float]) -> Iterator[None]:
    """Note the processor time of PyTorch's own traces, of the model and of layers, inside."""
    original = joint.aot_export_joint_with_descriptors

    def trace(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            took_s.append(time.process_time() - begin_s)

    for module in (joint, layer_trace):
        module.aot_export_joint_with_descriptors = trace
    try:
        yield
    finally:
        for module in (joint, layer_trace):
            module.aot_export_joint_with_descriptors = original


def row(layers: int, width: int) -> dict[str, float]:
    """Return the figures of a model, measured in this process."""
    model = Stack(layers, width)
    tensors = [tensor.nbytes for tensor in model.parameters()]
    found: dict[str, float] = {
        "layers": layers,
        "width": width,
        "model_mb": round(sum(tensors) / 1e6, 1),
        "largest_mb": round(max(tensors) / 1e6, 1),
    }

    def timed(name: str, make: Callable[[], Any]) -> Any:
        begin_s = time.process_time()
        made = make()
        found[name] = round(time.process_time() - begin_s, 3)
        return made

    def captured(model: nn.Module = model) -> Any:
        return capture(
            model,
            functional.cross_entropy,
            batch(),
            mode="train",
            backward=True,
            metrics=None,
            precision="fp32",
            device_type="cpu",
            on_device=None,
            fuse=False,
            varying=None,
        )

    captured(Stack(1, WIDTH))  # imports, and what PyTorch sets up once
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    pytorch_s: list[float] = []
    with TRACING, times_of(pytorch_s):
        made = timed("capture_s", captured)
        found["pytorch_s"] = round(sum(pytorch_s), 3)
        traced = timed("model_s", lambda: TracedModel(made, backward=True).halved())
        found["peak_mb"] = round((memory_bytes("VmHWM") - before) / 1e6, 1)
        timed("stage_s", traced.divide)
        timed("segments_s", lambda: traced.divide([[name] for name in traced.segments]))
    return found


def apart(*arguments: object) -> dict[str, Any]:
    """Return what this script measures in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def capture_rows(layers: Sequence[int], width: int = WIDTH) -> list[dict[str, Any]]:
    """Return the figures of models of some layers, each in a process of its own."""
    return [apart("--row", count, "--width", width) for count in layers]


def captures_of_lengths(lengths: int) -> dict[str, Any]:
    """Return the captures of a run over batches of so many lengths, and how far its losses are from PyTorch's."""
    torch.manual_seed(0)
    plain, model = Encoder().double(), Encoder().double()
    model.load_state_dict(plain.state_dict())
    draw = torch.Generator().manual_seed(3)
    order = [8 + int(extra) for extra in torch.randperm(lengths, generator=draw)]
    given = [
        (
            torch.randint(1, WORDS, (SAMPLES, length), generator=draw),
            torch.randint(0, CLASSES, (SAMPLES,), generator=draw),
        )
        for length in order
    ]
    step = plain_step(plain, sgd(plain))
    expected = [float(step(*each)) for each in given]
    with (
        counted() as captures_s,
        onebox.open("cpu*1", threads=1) as pool,
        onebox.Trainer(model, functional.cross_entropy, sgd(model), pool=pool) as trainer,
    ):
        losses = [float(trainer.step(*each)) for each in given]
    furthest = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return {"lengths": len(set(order)), "captures": len(captures_s), "losses_apart": furthest}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--wide", type=int, default=WIDE_LAYERS, help="layers of the wide model; 0 for none")
    parser.add_argument("--row", type=int, help="print the row of a model, measured in this process, and nothing else")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.row is not None:
        print(json.dumps(row(options.row, options.width)))
        return
    rows = capture_rows(options.layers)
    rows += capture_rows([options.wide], WIDE_WIDTH) if options.wide else []
    columns = tuple(rows[0])
    show("Captures, processor seconds and MB", columns, [[str(each[column]) for column in columns] for each in rows])
    lengths = captures_of_lengths(LENGTHS)
    figures = [
        [f"captures for {lengths['lengths']} lengths", str(lengths["captures"])],
        ["losses apart by at most", f"{lengths['losses_apart']:.1e}"],
    ]
    show("Lengths", ("figure", "value"), figures)
    finish({"rows": rows, "lengths": lengths, "machine": machine(), "commit": commit()}, as_json=options.json)


if __name__ == "__main__":
    main()
