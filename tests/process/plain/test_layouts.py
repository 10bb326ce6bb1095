"""Models whose tensors lie in memory in an order of their own, as those of series, heads and maps do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.pools import Pools
from tests.process.plain.case import Case, case, check
from tests.process.plain.data import randn, sgd
from tests.process.plain.ways import Way


def test_as_plain_pytorch(case: Case, way: str, pools: Pools) -> None:
    check(case, way, pools)


TIME, CHANNELS, AHEAD, WIDTH = 12, 3, 4, 8


class Layers(nn.ModuleDict):
    """Layers, and a function of them and the inputs.

    Args:
        compute: From (layers, inputs) to outputs.
        layers: By name.
    """

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], layers: Mapping[str, nn.Module]) -> None:
        super().__init__(layers)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def declare(
    name: str,
    compute: Callable[[Any, Tensor], Tensor],
    layers: Callable[[], Mapping[str, nn.Module]],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    shape: tuple[int, ...] = (TIME, CHANNELS),
    positive: bool = False,
    **options: Any,
) -> None:
    """Declare a case that trains layers.

    Args:
        name: Of the case.
        compute: See :class:`Layers`.
        layers: Makes the layers.
        loss: Of outputs and targets of the same shape.
        shape: Of a sample of the inputs.
        positive: Whether targets are shares instead of normal numbers.
        **options: Of the case.
    """

    def script(way: Way) -> None:
        model = Layers(compute, layers())
        with torch.no_grad():
            made = tuple(model(torch.zeros(2, *shape)).shape[1:])
        targets = [randn(8, *made, seed=50 + n) for n in range(2)]
        batches = [(randn(8, *shape, seed=n), t.sigmoid() if positive else t) for n, t in enumerate(targets)]
        way.train(model, loss, sgd, batches, micro_batch=None if options.get("devices") == 1 else 4)

    script.__name__ = name
    script.__module__ = __name__
    case(**options)(script)


# ---- losses of outputs that are transposed


def turned(layers: Any, x: Tensor) -> Tensor:
    return layers["line"](x).transpose(1, 2)


def line() -> dict[str, nn.Module]:
    return {"line": nn.Linear(CHANNELS, 5)}


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft_margin": lambda outputs, targets: F.soft_margin_loss(outputs, targets.sign()),
    "cosine": lambda outputs, targets: 1 - F.cosine_similarity(outputs, targets, dim=1).mean(),
    "log_cosh": lambda outputs, targets: (outputs - targets).cosh().log().mean(),
}
for _name, _loss in LOSSES.items():
    declare(f"{_name}_of_transposed_outputs", turned, line, loss=_loss)
SHARES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "bce": lambda outputs, targets: F.binary_cross_entropy(outputs.sigmoid(), targets),
    "kl": lambda outputs, targets: F.kl_div(
        outputs.log_softmax(1), targets / targets.sum(1, True), reduction="none"
    ).mean(),
    "cross_entropy": lambda outputs, targets: F.cross_entropy(outputs, targets / targets.sum(1, True)),
    "classes": lambda outputs, targets: F.cross_entropy(outputs, targets.argmax(1)),
    "poisson_nll": F.poisson_nll_loss,
}
for _name, _loss in SHARES.items():
    declare(f"{_name}_of_transposed_outputs", turned, line, loss=_loss, positive=True)


# ---- activations of heads


def heads(activation: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return linear attention with an activation of queries and keys."""

    def compute(layers: Any, x: Tensor) -> Tensor:
        q, k, v = (t.view(len(x), TIME, 2, 4).transpose(1, 2) for t in layers["qkv"](x).chunk(3, -1))
        mixed = (activation(q) + 1) @ ((activation(k) + 1).transpose(-1, -2) @ v) / (4 * TIME)
        return layers["out"](mixed.transpose(1, 2).reshape(len(x), TIME, WIDTH)).mean(1)

    return compute


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "softplus": F.softplus,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "logit": lambda x: x.sigmoid().logit(eps=1e-6),
    "log_sigmoid": F.logsigmoid,
    "rrelu": lambda x: F.rrelu(x, training=False),
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "softmax": lambda x: x.softmax(-2),
    "exp": torch.exp,
}
for _name, _activation in ACTIVATIONS.items():
    declare(f"heads_with_{_name}", heads(_activation), lambda: {"qkv": nn.Linear(CHANNELS, 24), "out": nn.Linear(8, 4)})


# ---- architectures


def dlinear(layers: Any, x_BTC: Tensor) -> Tensor:
    """Trend and season, each continued by a line over time."""
    padded = F.pad(x_BTC.transpose(1, 2), (2, 2), mode="replicate")
    trend_BTC = F.avg_pool1d(padded, 5, 1).transpose(1, 2)
    season_BCT, trend_BCT = (x_BTC - trend_BTC).transpose(1, 2), trend_BTC.transpose(1, 2)
    return (layers["season"](season_BCT) + layers["trend"](trend_BCT)).transpose(1, 2)


declare("dlinear", dlinear, lambda: {"season": nn.Linear(TIME, AHEAD), "trend": nn.Linear(TIME, AHEAD)})


def itransformer(layers: Any, x_BTC: Tensor) -> Tensor:
    """Attention between channels, each of which is one token, normalised over time."""
    mean = x_BTC.mean(1, keepdim=True).detach()
    deviation = (x_BTC - mean).var(1, keepdim=True, unbiased=False).add(1e-5).sqrt()
    tokens = layers["embed"](((x_BTC - mean) / deviation).permute(0, 2, 1))
    made = layers["ahead"](layers["encoder"](tokens)).permute(0, 2, 1)
    return made * deviation + mean


declare(
    "itransformer",
    itransformer,
    lambda: {
        "embed": nn.Linear(TIME, WIDTH),
        "encoder": nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
        "ahead": nn.Linear(WIDTH, AHEAD),
    },
)


def patches(layers: Any, x_BTC: Tensor) -> Tensor:
    """Overlapping patches of each channel as tokens, as in PatchTST."""
    patched_BCNP = x_BTC.permute(0, 2, 1).unfold(-1, 4, 2)
    tokens = layers["embed"](patched_BCNP).flatten(0, 1)
    made = layers["encoder"](tokens).unflatten(0, (len(x_BTC), CHANNELS))
    return layers["head"](made.permute(0, 1, 3, 2).flatten(-2)).permute(0, 2, 1)


declare(
    "patch_tst",
    patches,
    lambda: {
        "embed": nn.Linear(4, WIDTH),
        "encoder": nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, activation="gelu"),
        "head": nn.Linear(WIDTH * 5, AHEAD),
    },
)


def normed(layers: Any, x: Tensor) -> Tensor:
    h = layers["norm"](layers["first"](x).transpose(1, 2)).transpose(1, 2)
    return layers["last"](h.relu())


for _name, _norm, _options in [
    ("batch_norm", lambda: nn.BatchNorm1d(WIDTH), {"devices": 1}),
    ("frozen_batch_norm", lambda: nn.BatchNorm1d(WIDTH).eval(), {}),
    ("batch_norm_without_statistics", lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), {"devices": 1}),
    ("group_norm", lambda: nn.GroupNorm(2, WIDTH), {}),
    ("instance_norm", lambda: nn.InstanceNorm1d(WIDTH, affine=True), {}),
    ("layer_norm", lambda: nn.LayerNorm(TIME), {}),
]:
    declare(
        f"{_name}_over_series",
        normed,
        lambda norm=_norm: {"first": nn.Linear(CHANNELS, WIDTH), "norm": norm(), "last": nn.Linear(WIDTH, 4)},
        **_options,
    )


def mixer(layers: Any, x: Tensor) -> Tensor:
    """Lines over time and over channels in turn, as in TSMixer."""
    x = x + layers["time"](x.transpose(1, 2)).transpose(1, 2)
    return layers["ahead"]((x + F.hardswish(layers["channels"](x))).transpose(1, 2)).transpose(1, 2)


declare(
    "mixer",
    mixer,
    lambda: {
        "time": nn.Sequential(nn.Linear(TIME, TIME), nn.ELU()),
        "channels": nn.Linear(CHANNELS, CHANNELS),
        "ahead": nn.Linear(TIME, AHEAD),
    },
)


def convolved(layers: Any, x: Tensor) -> Tensor:
    """Gated convolutions over time, as in WaveNet and the Conformer."""
    h = F.glu(layers["wide"](layers["in"](x).transpose(1, 2)), dim=1)
    h = F.hardswish(layers["depth"](h)).transpose(1, 2)
    return layers["out"](F.softplus(h)).transpose(1, 2)


declare(
    "gated_convolutions",
    convolved,
    lambda: {
        "in": nn.Linear(CHANNELS, WIDTH),
        "wide": nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1),
        "depth": nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH),
        "out": nn.Linear(WIDTH, 4),
    },
)


def recurrent(layers: Any, x: Tensor) -> Tensor:
    made, _ = layers["cell"](x)
    return F.elu(layers["out"](made).transpose(1, 2)).flatten(1)


declare(
    "recurrent_series", recurrent, lambda: {"cell": nn.GRU(CHANNELS, WIDTH, batch_first=True), "out": nn.Linear(8, 4)}
)


def spectral(layers: Any, x: Tensor) -> Tensor:
    """The lowest frequencies of each channel, as in FEDformer."""
    kept = torch.fft.rfft(x.transpose(1, 2), dim=-1)[..., :4]
    parts = torch.view_as_real(kept).transpose(2, 3)
    made = F.hardtanh(layers["line"](parts)).transpose(2, 3).contiguous()
    return torch.fft.irfft(torch.view_as_complex(made), n=TIME, dim=-1).transpose(1, 2)


declare("frequencies", spectral, lambda: {"line": nn.Linear(4, 4)})


def rotary(layers: Any, x: Tensor) -> Tensor:
    """Queries turned as complex numbers."""
    q = F.elu(layers["q"](x).view(len(x), TIME, 2, 4).transpose(1, 2))
    turn = torch.polar(torch.ones(TIME, 2, device=x.device), torch.arange(24.0, device=x.device).view(TIME, 2))
    made = torch.view_as_real(torch.view_as_complex(q.reshape(*q.shape[:-1], 2, 2)) * turn).flatten(3)
    return layers["out"](made.transpose(1, 2).flatten(2))


declare("rotary_positions", rotary, lambda: {"q": nn.Linear(CHANNELS, WIDTH), "out": nn.Linear(WIDTH, 4)})


def attention(layers: Any, x: Tensor) -> Tensor:
    q, k, v = (F.elu(t.unflatten(-1, (2, 4)).transpose(1, 2)) for t in layers["qkv"](x).chunk(3, -1))
    return layers["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).transpose(1, 2)


declare("attention_of_activated_heads", attention, lambda: {"qkv": nn.Linear(CHANNELS, 24), "out": nn.Linear(8, 4)})


def windows(layers: Any, x: Tensor) -> Tensor:
    """Overlapping windows by their strides, as in Longformer."""
    h = layers["first"](x).transpose(1, 2).contiguous()
    steps = h.stride()
    cut = h.as_strided((len(x), WIDTH, 5, 4), (steps[0], steps[1], 2 * steps[2], steps[2]))
    return layers["last"](F.elu(cut).transpose(1, 2).flatten(2))


declare("strided_windows", windows, lambda: {"first": nn.Linear(CHANNELS, WIDTH), "last": nn.Linear(32, 4)})


def written(layers: Any, x: Tensor) -> Tensor:
    """Every fourth element, by its strides, is written in place."""
    h = layers["first"](x).transpose(1, 2).clone()
    h.as_strided((len(x), 24), (TIME * WIDTH, 4), 1).mul_(2)
    return F.softplus(h).flatten(1)


declare("writes_by_strides", written, lambda: {"first": nn.Linear(CHANNELS, WIDTH)})


def sliced(layers: Any, x: Tensor) -> Tensor:
    """Copies of slices, of expanded and of transposed values, in another shape."""
    h = layers["first"](x)
    first = h[:, ::2, :3].clone().view(len(x), -1)
    second = h[:, :1].expand(-1, 3, -1).clone().view(len(x), -1)
    third = h.transpose(1, 2)[:, :2].clone(memory_format=torch.contiguous_format).view(len(x), -1)
    return torch.cat([first, second, third], 1)


declare("copies_of_slices", sliced, lambda: {"first": nn.Linear(CHANNELS, WIDTH)})


def maps(layers: Any, x: Tensor) -> Tensor:
    """A block of ConvNeXt: channels go last for the norm and the lines."""
    h = layers["depth"](x).permute(0, 2, 3, 1)
    h = layers["wide"](layers["norm"](h))
    return layers["narrow"](F.hardsigmoid(h)).permute(0, 3, 1, 2).flatten(2)


declare(
    "convnext_block",
    maps,
    lambda: {
        "depth": nn.Conv2d(4, 4, 3, padding=1, groups=4),
        "norm": nn.LayerNorm(4),
        "wide": nn.Linear(4, 8),
        "narrow": nn.Linear(8, 3),
    },
    shape=(4, 6, 6),
)


def partition(layers: Any, x: Tensor) -> Tensor:
    """Attention within windows of maps, as in Swin."""
    h = F.hardswish(layers["in"](x)).permute(0, 2, 3, 1)
    h = h.view(len(x), 2, 3, 2, 3, WIDTH).transpose(2, 3).reshape(-1, 9, WIDTH)
    made, _ = layers["attend"](h, h, h, need_weights=False)
    h = F.elu(made).view(len(x), 2, 2, 3, 3, WIDTH).transpose(2, 3).reshape(len(x), 6, 6, WIDTH)
    return h.permute(0, 3, 1, 2)


declare(
    "swin_windows",
    partition,
    lambda: {"in": nn.Conv2d(4, WIDTH, 1), "attend": nn.MultiheadAttention(WIDTH, 2, batch_first=True)},
    shape=(4, 6, 6),
)


def shuffled(layers: Any, x: Tensor) -> Tensor:
    h = F.relu6(layers["first"](x))
    h = h.view(len(x), 2, 4, 6, 6).transpose(1, 2).reshape(len(x), WIDTH, 6, 6)
    return F.pixel_shuffle(F.hardswish(layers["last"](h)), 2)


declare(
    "shuffled_channels",
    shuffled,
    lambda: {"first": nn.Conv2d(4, WIDTH, 1, groups=2), "last": nn.Conv2d(WIDTH, 4, 3, padding=1, groups=2)},
    shape=(4, 6, 6),
)


def channels_last(layers: Any, x: Tensor) -> Tensor:
    h = layers["first"](x.to(memory_format=torch.channels_last))
    h = F.adaptive_avg_pool2d(F.elu(h), 3)
    return layers["last"](h.flatten(1)).view(len(x), 2, 2).transpose(1, 2)


declare(
    "channels_last_maps",
    channels_last,
    lambda: {"first": nn.Conv2d(4, WIDTH, 3), "last": nn.Linear(WIDTH * 9, 4)},
    shape=(4, 6, 6),
    loss=F.huber_loss,
)


def carried(layers: Any, x: Tensor) -> Tensor:
    """A buffer that keeps its elements in another order from one step to the next."""
    h = layers["first"](x)
    state = layers.state
    layers.state = (0.5 * state + h.detach().mean(0)).t().contiguous().t()
    return F.elu(h + state.reshape(-1).view(TIME, WIDTH)).transpose(1, 2)


class Carried(Layers):
    """Layers with a buffer of what they saw."""

    def __init__(self) -> None:
        super().__init__(carried, {"first": nn.Linear(CHANNELS, WIDTH)})
        self.register_buffer("state", torch.zeros(TIME, WIDTH))


@case(devices=1)
def buffer_in_another_order(way: Way) -> None:
    batches = [(randn(8, TIME, CHANNELS, seed=n), randn(8, WIDTH, TIME, seed=50 + n)) for n in range(3)]
    way.train(Carried(), F.mse_loss, sgd, batches)
