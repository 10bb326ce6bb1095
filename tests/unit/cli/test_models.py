"""The models of ``onebox train``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from onebox.cli.models import MODEL_NAMES, Cnn, Gpt, ImageShape, Mlp, Normalize, ResNet, build_model
from onebox.errors import UsageError

SMALL_RESNET_WIDTH = 8


def images(batch: int, channels: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (batch, channels, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def build(name: str, image: tuple[int, int, int] = (1, 8, 8), **changes: Any) -> nn.Module:
    channels, height, width = image
    arguments = {"classes": 10, "mean": [0.3] * channels, "std": [0.4] * channels, "seed": 0} | changes
    return build_model(name, channels=channels, height=height, width=width, **arguments)


def small(name: str, image: ImageShape) -> nn.Module:
    """Build a model that is quick to run: the resnet narrower than the command's."""
    if name != "resnet":
        return build(name, (image.channels, image.height, image.width))
    normalize = Normalize([0.3] * image.channels, [0.4] * image.channels)
    return nn.Sequential(normalize, ResNet(image, 10, base_width=SMALL_RESNET_WIDTH))


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("size", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 5, 9)])
def test_uint8_images_of_any_size_become_logits(name: str, size: tuple[int, int, int]) -> None:
    model = small(name, ImageShape(channels=size[0], height=size[1], width=size[2]))
    logits = model(images(3, *size))
    assert logits.shape == (3, 10)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_resnet_of_the_command_is_resnet_18() -> None:
    model = build("resnet", (3, 32, 32))
    weights = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(weights) == 18 + 3  # and three convolutions on shortcuts
    # 11.69 million with 1000 classes and a 7x7 stem (torchvision); here 10 classes and a 3x3 stem
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_689_512 - 990 * 513 - 64 * 3 * 40


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_model_can_be_captured(name: str, training: bool) -> None:
    model = small(name, ImageShape(channels=1, height=8, width=8)).train(training)
    x = images(4, 1, 8, 8)
    program = export(model, (x,), strict=False)
    assert {spec.target for spec in program.graph_signature.input_specs if spec.persistent is False} == {
        f"{'0' if name == 'resnet' else 'normalize'}.{constant}" for constant in ("mean", "std")
    }
    if not training:
        torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_seed_alone_decides_the_weights(name: str) -> None:
    torch.manual_seed(5)
    first = build(name, seed=7).state_dict()
    torch.manual_seed(6)
    again, other = build(name, seed=7).state_dict(), build(name, seed=8).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_global_random_state_is_left_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    build(name)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_default_device_does_not_change_the_model() -> None:
    with torch.device("meta"):
        model = build("mlp")
    expected = build("mlp").state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


def test_an_unknown_name_is_refused_with_the_names_that_are_known() -> None:
    with pytest.raises(UsageError, match="no model 'vgg'; choose one of mlp, cnn, resnet, gpt"):
        build("vgg")


@pytest.mark.parametrize(
    "changes",
    [{"classes": 0}, {"mean": [0.1, 0.2]}, {"std": [0.0]}, {"std": []}, {"image": (0, 8, 8)}],
    ids=str,
)
def test_numbers_that_make_no_classifier_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        build("mlp", **changes)


def test_normalize_gives_each_channel_mean_0_and_deviation_1() -> None:
    x = images(5, 3, 7, 6)
    share = x.double() / 255
    mean, std = share.mean((0, 2, 3)), share.std((0, 2, 3))
    y = Normalize(mean.tolist(), std.tolist())(x)
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.std((0, 2, 3)), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_dtype_follows_the_parameters(name: str, dtype: torch.dtype) -> None:
    model = small(name, ImageShape(channels=1, height=8, width=8)).to(dtype)
    assert model(images(2, 1, 8, 8)).dtype == dtype


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_checkpoint_holds_no_constants(name: str) -> None:
    assert all(key.startswith("body.") for key in build(name).state_dict())


def test_the_gpt_is_causal() -> None:
    image = ImageShape(channels=1, height=6, width=4)
    gpt = Gpt(image, 3, features=8, depth=2, heads=2)
    x = torch.randn(1, 6, 8)
    changed = x.clone()
    changed[:, 3] = torch.randn(8)
    same = (gpt.blocks(x) == gpt.blocks(changed)).all(-1)[0]
    assert same.tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("body", [Mlp, Cnn, ResNet, Gpt])
def test_a_body_alone_takes_numbers(body: Any) -> None:
    model = body(ImageShape(channels=1, height=8, width=8), 4)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 4)
