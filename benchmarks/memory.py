"""How much less memory does a device need when a model is on two of them?

AlexNet and VGG-16 at reduced size, trained on one device and on two, with the same batch as one micro-batch and SGD
with momentum; the peak is the workers' own accounting of parameters, gradients, optimizer state and activations. Two
ways to use two devices: each layer split over both (as Mariana did, 2014: 3.99 to 2.15 GB, 46 % less), and two
stages.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch
from common import finish, show
from torch import Tensor, nn

import onebox
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage

BATCH = 32
CLASSES = 100
STEPS = 3


def alexnet(width: int = 32) -> nn.Module:
    """Return AlexNet (Krizhevsky 2012) with half of its feature maps, for images of 64 x 64."""
    channels = (3, width, 3 * width, 6 * width, 4 * width, 4 * width)
    layers: list[nn.Module] = [nn.Conv2d(channels[0], channels[1], 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(channels[1], channels[2], 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    for before, after in itertools.pairwise(channels[2:]):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(16 * channels[-1], 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, CLASSES))


def vgg16(width: int = 16) -> nn.Module:
    """Return VGG-16 (Simonyan 2014) with a quarter of its feature maps, for images of 64 x 64."""
    layers: list[nn.Module] = []
    before = 3
    for count, factor in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
        for _ in range(count):
            layers += [nn.Conv2d(before, factor * width, 3, padding=1), nn.ReLU()]
            before = factor * width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(4 * before, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, CLASSES))


MODELS = {"alexnet": alexnet, "vgg16": vgg16}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    rows, result = [], {}
    for name in MODELS:
        one = max(peaks(name, Plan.data_parallel([0], [1.0], micro_batch=BATCH)))
        split = max(peaks(name, Plan(stages=(Stage(replicas=((0, 1),), shares=(1.0,)),), micro_batch=BATCH)))
        stages = min(max(peaks(name, plan)) for plan in two_stages(name, one))
        result[f"{name}_saving"] = round(1 - min(split, stages) / one, 4)
        rows.append([name, *(f"{peak / 2**20:.1f}" for peak in (one, split, stages))])
        rows[-1] += [f"{1 - split / one:.1%}", f"{1 - stages / one:.1%}"]
    show(
        f"Peak memory of a device, MiB; batch {BATCH} as one micro-batch, float32",
        ["model", "one device", "layers split", "two stages", "split saves", "stages save"],
        rows,
    )
    finish(result, as_json=options.json)


def data() -> tuple[Tensor, Tensor]:
    """Return a batch of random images and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, 64, 64, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def peaks(name: str, plan: Plan) -> list[int]:
    """Return the most bytes that each device of a plan used, in a pool of its own."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with (
        onebox.open(f"cpu*{len(plan.devices)}", threads=1) as pool,
        onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool, plan=plan) as trainer,
    ):
        for _ in range(STEPS):
            trainer.step(*data())
        trainer.wait()
        return [memory.peak_bytes for memory in trainer.memory()]


def two_stages(name: str, whole: int) -> Sequence[Plan]:
    """Return the plans of two stages that promise the least memory: the three best cuts."""
    model = MODELS[name]()
    segments = TracedModel(capture(model, nn.functional.cross_entropy, data()), backward=True).segments
    promised: list[tuple[int, Plan]] = []
    with onebox.open("cpu*2", threads=1) as pool:
        for cut in range(1, len(segments)):
            stages = tuple(
                Stage(segments=part, replicas=((device,),), shares=(1.0,))
                for device, part in enumerate((segments[:cut], segments[cut:]))
            )
            plan = Plan(stages=stages, micro_batch=BATCH, schedule="1f1b")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            with onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool, plan=plan) as trainer:
                promised.append((max(trainer.predicted_memory(*data()).values()), plan))
    best = sorted(promised, key=lambda pair: pair[0])[:1]
    assert best[0][0] < whole, "no cut needs less memory than one device"
    return [plan for _, plan in best]


if __name__ == "__main__":
    main()
