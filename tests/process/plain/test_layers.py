"""Layers, parametrizations and control flow in forward: as plain PyTorch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from onebox.plan import Plan, Stage
from tests.kit.pools import Pools
from tests.process.plain.case import EQUAL, TORCH_2_11, Case, case, check, equal_or_refused, refused
from tests.process.plain.data import Between, integers, labelled, mlp, randn, sgd, tokens
from tests.process.plain.ways import Loop, Way


def test_as_plain_pytorch(case: Case, way: str, pools: Pools) -> None:
    check(case, way, pools)


class Classified(nn.Module):
    """A front with a linear layer behind it.

    Args:
        front: Its parameters and buffers.
        features: From (front, inputs) to features [B, width].
        width: Of the features.
    """

    def __init__(self, front: nn.Module, features: Callable[..., Tensor], width: int) -> None:
        super().__init__()
        self.front = front
        self.features = features
        self.head = nn.Linear(width, 4)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.head(self.features(self.front, *inputs))


def normed(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 4))


def wrapped(change: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    return nn.Sequential(change(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4))


def train(way: Way, model: nn.Module, batches: Any = None, micro_batch: int | None = 8, **options: Any) -> None:
    way.train(model, F.cross_entropy, sgd, batches or labelled(), micro_batch=micro_batch, **options)


@case()
def weight_norm(way: Way) -> None:
    train(way, wrapped(parametrizations.weight_norm))


@case(trainer=None if TORCH_2_11 else EQUAL)
def weight_norm_by_a_hook(way: Way) -> None:
    train(way, wrapped(nn.utils.weight_norm))


@case(trainer=refused("order of samples.*one device"))
def spectral_norm(way: Way) -> None:
    train(way, wrapped(parametrizations.spectral_norm))


@case(devices=1)
def spectral_norm_on_one_device(way: Way) -> None:
    train(way, wrapped(parametrizations.spectral_norm))


@case(vgpu=None)
def spectral_norm_in_a_pipeline(way: Way) -> None:
    """Captured for an evaluation, its vectors are copied before anything else is computed."""
    cuts = ("model.0",), ("model.1.parametrizations.weight.0", "model.2")
    stages = (Stage(segments=own, replicas=((n,),), shares=(1.0,)) for n, own in enumerate(cuts))
    plan = {"plan": Plan(stages=tuple(stages), micro_batch=8)} if way.name == "trainer" else {}
    model = nn.Sequential(nn.Linear(8, 8), parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    losses: list[float] = []

    def after(step: int, loop: Loop) -> None:
        losses.append(loop.evaluate(labelled(1)))

    train(way, model, micro_batch=None if plan else 8, after=after, **plan)
    way.note(losses=losses)


@case(devices=1, trainer=None if TORCH_2_11 else EQUAL)
def spectral_norm_by_a_hook_on_one_device(way: Way) -> None:
    train(way, wrapped(nn.utils.spectral_norm), micro_batch=None)


@case()
def orthogonal(way: Way) -> None:
    train(way, wrapped(parametrizations.orthogonal))


@case()
def batch_norm(way: Way) -> None:
    train(way, normed(nn.BatchNorm1d(16)))


@case()
def batch_norm_of_the_inputs(way: Way) -> None:
    """Its inputs get no gradient."""
    train(way, nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)))


@case()
def batch_norm_without_statistics(way: Way) -> None:
    train(way, normed(nn.BatchNorm1d(16, track_running_stats=False)))


@case()
def batch_norm_frozen(way: Way) -> None:
    model = normed(nn.BatchNorm1d(16))
    model[1].eval()
    train(way, model)


@case(trainer=refused(r"momentum"))
def batch_norm_with_a_cumulative_average(way: Way) -> None:
    train(way, normed(nn.BatchNorm1d(16, momentum=None)))


@case(trainer=refused("SyncBatchNorm|whole batch"), vgpu=None)
def sync_batch_norm(way: Way) -> None:
    """Statistics of the whole batch, whatever its shares."""
    train(way, normed(nn.BatchNorm1d(16) if way.name == "plain" else nn.SyncBatchNorm(16)), micro_batch=None)


def causal(mha: nn.Module, x: Tensor, pad: Tensor) -> Tensor:
    mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device), 1)
    return mha(x, x, x, key_padding_mask=pad, attn_mask=mask, need_weights=False)[0].mean(1)


def padded() -> list[tuple[Any, Tensor]]:
    pad = torch.arange(6)[None] >= integers(3, 7, 16, 1)
    return [((x, pad), y) for x, y in labelled(shape=(6, 8))]


@case()
def attention_with_masks(way: Way) -> None:
    train(way, Classified(nn.MultiheadAttention(8, 2, batch_first=True), causal, 8), padded())


@case()
def transformer_encoder(way: Way) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    train(way, Classified(encoder, lambda e, x, pad: e(x, src_key_padding_mask=pad).mean(1), 8), padded())


@case()
def bidirectional_lstm_of_two_layers(way: Way) -> None:
    lstm = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)
    train(way, Classified(lstm, lambda r, x: r(x)[0].mean(1), 16), labelled(3, shape=(10, 8)))


@case(trainer=refused("first dimension"), vgpu=None)
def lstm_with_samples_second(way: Way) -> None:
    batches = [(randn(7, 16, 8), integers(0, 4, 16))]
    train(way, Classified(nn.LSTM(8, 16), lambda r, x: r(x)[0][-1], 16), batches, micro_batch=None)


@case(trainer=refused("batch|sample"))
def lstm_with_samples_second_and_as_many_steps(way: Way) -> None:
    """The split is along time, and no shape tells."""
    model = Classified(nn.LSTM(8, 16), lambda r, x: r(x)[0].mean(0), 16)
    train(way, model, labelled(1, shape=(16, 8)), micro_batch=None)


def packed(lstm: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    sequence = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return lstm(sequence)[1][0][-1]


@case(trainer=refused("pack"))
def packed_lstm(way: Way) -> None:
    batches = [((x, integers(3, 8, 16)), y) for x, y in labelled(3, shape=(7, 8))]
    train(way, Classified(nn.LSTM(8, 16, batch_first=True), packed, 16), batches)


@case()
def lengths_that_vary(way: Way) -> None:
    model = Classified(nn.Embedding(20, 8), lambda e, x: e(x).mean(1), 8)
    train(way, model, [batch for length in (4, 7, 5, 7) for batch in tokens(1, length)])


@case()
def embedding_bag(way: Way) -> None:
    train(way, Classified(nn.EmbeddingBag(20, 8, mode="mean"), lambda e, x: e(x), 8), tokens())


@case(trainer=refused("layout|sparse"))
def sparse_embedding(way: Way) -> None:
    model = Classified(nn.Embedding(20, 8, sparse=True), lambda e, x: e(x).mean(1), 8)
    way.train(model, F.cross_entropy, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), tokens())


@case(trainer=refused("layout|sparse"))
def sparse_embedding_bag(way: Way) -> None:
    model = Classified(nn.EmbeddingBag(20, 8, mode="sum", sparse=True), lambda e, x: e(x), 8)
    way.train(model, F.cross_entropy, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), tokens())


@case(trainer=refused("writes to a parameter"))
def embedding_with_a_largest_norm(way: Way) -> None:
    train(way, Classified(nn.Embedding(20, 8, padding_idx=0, max_norm=1.0), lambda e, x: e(x).mean(1), 8), tokens())


class Spectrum(nn.Module):
    """A weight in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.weight), n=8)


@case()
def fourier_transform(way: Way) -> None:
    train(way, nn.Sequential(nn.Linear(8, 8), Spectrum(), nn.Linear(8, 4)))


@case()
def complex_values_inside(way: Way) -> None:
    def turned(module: Any, h: Tensor) -> Tensor:
        z = torch.view_as_complex(h.view(-1, 4, 2))
        return torch.view_as_real(z * torch.exp(1j * torch.arange(4.0, device=h.device))).flatten(1)

    train(way, Between(turned))


class ComplexLinear(nn.Module):
    """A matrix of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


@case()
def complex_weights(way: Way) -> None:
    train(way, nn.Sequential(ComplexLinear(), nn.Linear(8, 4)))


class Spectrogram(nn.Module):
    """The logarithm of a short-time Fourier transform, with a convolution over it."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.before = nn.Conv1d(1, 1, 5, padding=2) if learned else None
        self.register_buffer("window", torch.hann_window(64))
        self.after = nn.Conv1d(33, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else self.before(x[:, None])[:, 0]
        z = torch.stft(x, 64, 16, window=self.window, return_complex=True)
        return self.after(z.abs().pow(2).add(1e-2).log()).mean(-1)


@case()
def spectrogram(way: Way) -> None:
    train(way, nn.Sequential(Spectrogram(learned=False), nn.Linear(8, 4)), labelled(3, shape=(400,)))


@case()
def spectrogram_behind_a_learned_layer(way: Way) -> None:
    train(way, nn.Sequential(Spectrogram(learned=True), nn.Linear(8, 4)), labelled(3, shape=(400,)))


class Transformer2d(nn.Module):
    """A spatial transformer: the image is turned by what a layer says."""

    def __init__(self) -> None:
        super().__init__()
        self.pose, self.conv = nn.Linear(64, 6), nn.Conv2d(1, 2, 3)
        nn.init.normal_(self.pose.weight, std=0.01)
        with torch.no_grad():
            self.pose.bias.copy_(torch.tensor([1.0, 0, 0, 0, 1.0, 0]))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.pose(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False)
        h = self.conv(F.grid_sample(x, grid, align_corners=False))
        h = F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=False)
        return F.interpolate(h, size=(5, 5), mode="bicubic").flatten(1)


@case()
def grid_sample_and_interpolate(way: Way) -> None:
    train(way, nn.Sequential(Transformer2d(), nn.Linear(50, 4)), labelled(shape=(1, 8, 8)))


@case(trainer=refused(r"test_layers\.py:\d+.*decides by the value"))
def if_by_value(way: Way) -> None:
    train(way, Between(lambda module, h: h * 2 if h.mean() > 0 else h))


@case(trainer=refused(r"test_layers\.py:\d+.*decides by the value"))
def loop_by_value(way: Way) -> None:
    def repeated(module: Any, h: Tensor) -> Tensor:
        for _ in range(int(h.detach().abs().max()) % 3):
            h = h.tanh()
        return h

    train(way, Between(repeated), micro_batch=None)


@case(trainer=refused(r"test_layers\.py:\d+.*torch\.where"))
def boolean_index(way: Way) -> None:
    model = Classified(nn.Linear(8, 4), lambda front, x: front(x)[x[:, 0] > 0], 4)
    way.train(model, lambda o, t: o.pow(2).mean(), sgd, labelled())


@case(trainer=refused(r"test_layers\.py:\d+.*numpy"), vgpu=None)
def numpy_in_forward(way: Way) -> None:
    """A virtual tensor is brought to the host by ``.cpu()`` first, as with any GPU."""
    train(way, Classified(nn.Linear(8, 4), lambda front, x: front(torch.from_numpy(x.numpy() * 2)), 4))


def matrices(h: Tensor) -> Tensor:
    """Return positive-definite matrices [B, 8, 8]."""
    return torch.eye(h.shape[1]) + h[:, :, None] * h[:, None]


@case(vgpu=None)
def linear_equations(way: Way) -> None:
    train(way, Between(lambda module, h: torch.linalg.solve(matrices(h), h[..., None])[..., 0]))


@case(vgpu=None)
def inverse_matrices(way: Way) -> None:
    train(way, Between(lambda module, h: torch.linalg.inv(matrices(h)).sum(1)))


@case(vgpu=None)
def triangular_factors(way: Way) -> None:
    train(way, Between(lambda module, h: torch.linalg.cholesky(matrices(h)).sum(1)))


@case()
def distributions_that_check_their_arguments(way: Way) -> None:
    def likely(module: Any, h: Tensor) -> Tensor:
        return torch.distributions.Normal(h, F.softplus(h) + 0.1).log_prob(h.detach() + 1)

    train(way, Between(likely))


@case()
def checks_of_sizes(way: Way) -> None:
    def checked(module: Any, h: Tensor) -> Tensor:
        torch._check(h.shape[1] == 8, lambda: "eight features")
        return h.tanh()

    train(way, Between(checked))


@case(trainer=refused(r"test_layers\.py:\d+.*draws from a torch\.Generator"), vgpu=None)
def a_generator_in_forward(way: Way) -> None:
    generator = torch.Generator().manual_seed(0)
    train(way, Between(lambda module, h: h + torch.randn(8, generator=generator)))


@case(trainer=refused(r"test_layers\.py:\d+.*workers do not have"), vgpu=None)
def an_operator_that_workers_do_not_have(way: Way) -> None:
    def means(module: Any, h: Tensor) -> Tensor:
        return h + torch.segment_reduce(h, "mean", lengths=torch.tensor([2, len(h) - 2]), axis=0).sum(0)

    train(way, Between(means))


@case(trainer=refused("lazy layer has no shape yet"), vgpu=None)
def lazy_layers(way: Way) -> None:
    train(way, nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 4)))


@case()
def print_in_forward(way: Way) -> None:
    train(way, Between(lambda module, h: (print(h.shape, end=""), h)[1]))


@case(vgpu=None)
def compiled_model(way: Way) -> None:
    train(way, mlp() if way.name == "plain" else torch.compile(mlp()), name="")


@case(trainer=refused("is scripted"))
def scripted_model(way: Way) -> None:
    train(way, torch.jit.script(mlp()))


@case(trainer=refused("DataParallel.*unwrap|unwrap.*DataParallel|model.module"))
def data_parallel(way: Way) -> None:
    model = mlp()
    if way.name == "vgpu":
        model.to("vgpu:0")
    devices = {"vgpu": ["vgpu:0", "vgpu:1"]}.get(way.name)
    train(way, nn.DataParallel(model, device_ids=devices) if way.name != "plain" else Held(model), micro_batch=None)


class Held(nn.Module):
    """A module under the name that ``DataParallel`` gives it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@case()
def functional_call(way: Way) -> None:
    def doubled(module: Any, h: Tensor) -> Tensor:
        changed = {"weight": module.first.weight * 2, "bias": module.first.bias}
        return torch.func.functional_call(module.first, changed, (h,)).relu()

    train(way, Between(doubled))


def described_images() -> nn.Module:
    """Return a small LLaVA, whose images are seen by hooks that transformers adds at the first call."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    common = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**common, image_size=16, patch_size=8),
        text_config=LlamaConfig(**common, num_key_value_heads=1, vocab_size=20, pad_token_id=0),
        image_token_index=19,
        vision_feature_layer=-1,
    )

    class Described(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llava = LlavaForConditionalGeneration(config)

        def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
            return self.llava(input_ids=tokens, pixel_values=images).logits[:, -1, :4]

    return Described()


@case(trainer=None if TORCH_2_11 else EQUAL, vgpu=None)
def vision_language_model(way: Way) -> None:
    batches: list[tuple[Any, Tensor]] = []
    for n in range(2):
        written = integers(3, 19, 4, 8, seed=n)
        written[:, 1:5] = 19
        batches.append(((written, randn(4, 3, 16, 16, seed=n)), integers(0, 4, 4, seed=n)))
    train(way, described_images(), batches, micro_batch=2)


class Slopes(nn.Module):
    """A model of an energy and its gradient by the inputs, as of forces on atoms.

    Args:
        required: Makes the inputs require gradients.
    """

    def __init__(self, required: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.hidden, self.energy, self.required = nn.Linear(8, 16), nn.Linear(16, 1), required

    def forward(self, x: Tensor) -> Tensor:
        self.required(x)
        energy = self.energy(self.hidden(x).tanh())
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, slope[:, :3]], 1)


@case()
def gradients_of_the_inputs(way: Way) -> None:
    train(way, Slopes(lambda x: x.requires_grad_()))


@case()
def gradients_of_inputs_that_an_attribute_asks_for(way: Way) -> None:
    def required(x: Tensor) -> None:
        x.requires_grad = True

    train(way, Slopes(required))


@case(trainer=equal_or_refused("line|virtual device"))
def jacobian_in_forward(way: Way) -> None:
    train(way, Between(lambda module, h: h * torch.func.vmap(torch.func.jacrev(torch.sin))(h).sum(1)))
