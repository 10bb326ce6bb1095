"""Layers work on a virtual device as on the CPU, in training and in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.process.vgpu.beside import HERE, Case, beside, fails_beside, fill, listed, normal

WORKING: list[Case] = []
FAILING: list[Case] = []
works, fails = listed(WORKING), listed(FAILING)


pytestmark = pytest.mark.usefixtures("pool")


def trained(module: nn.Module, device: str, *shapes: tuple[int, ...]) -> Any:
    """Return what a module makes, and all gradients and buffers."""
    module = fill(module).to(device)
    rows = [normal(*shape, device=device, requires_grad=True) for shape in shapes]
    made = module(*rows)
    flat = [made] if isinstance(made, Tensor) else [each for part in made for each in _flat(part)]
    sum((each**2).sum() for each in flat).backward()  # type: ignore[union-attr]
    return flat, [row.grad for row in rows], [each.grad for each in module.parameters()], list(module.buffers())


def _flat(part: Any) -> list[Tensor]:
    return [part] if isinstance(part, Tensor) else list(part)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "LSTM": (lambda: nn.LSTM(3, 4, 2, batch_first=True), ((2, 5, 3),)),
    "LSTM both ways": (lambda: nn.LSTM(3, 4, bidirectional=True, proj_size=2), ((5, 2, 3),)),
    "LSTM of one sequence": (lambda: nn.LSTM(3, 4, bias=False), ((5, 3),)),
    "GRU": (lambda: nn.GRU(3, 4, 2, bidirectional=True), ((5, 2, 3),)),
    "GRU without bias": (lambda: nn.GRU(3, 4, bias=False), ((5, 2, 3),)),
    "RNN": (lambda: nn.RNN(3, 4, nonlinearity="relu"), ((5, 2, 3),)),
    "conv of another shape": (lambda: nn.Conv1d(2, 4, 3, padding="same", padding_mode="circular"), ((2, 2, 9),)),
    "conv in groups": (lambda: nn.Conv2d(4, 6, 3, 2, 1, groups=2, padding_mode="reflect"), ((2, 4, 7, 7),)),
    "transposed conv": (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1, groups=2), ((1, 2, 4, 4),)),
    "bilinear": (lambda: nn.Bilinear(3, 3, 2), ((4, 3), (4, 3))),
    "mean of all batches": (lambda: nn.BatchNorm2d(3, momentum=None), ((3, 3, 4, 4),)),
    "norm without statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), ((3, 3, 4, 4),)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), ((3, 3, 4, 4),)),
    "group norm": (lambda: nn.GroupNorm(2, 4), ((3, 4, 4),)),
    "rms norm": (lambda: nn.RMSNorm(4), ((3, 4),)),
    "response norm": (lambda: nn.LocalResponseNorm(3), ((3, 4, 4, 4),)),
    "fold": (lambda: nn.Sequential(nn.Unfold(3, 1, 1, 2), nn.Fold((6, 6), 3, 1, 1, 2)), ((2, 3, 6, 6),)),
    "shuffle": (lambda: nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2)), ((1, 4, 3, 3),)),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), ((2, 3, 8), (2, 4, 8))),
    "parametrized": (lambda: parametrizations.weight_norm(fill(nn.Linear(4, 3))), ((2, 4),)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_layer_gives_what_it_gives_on_the_cpu(name: str) -> None:
    make, shapes = MODULES[name]

    def case(device: str) -> Any:
        module = make()
        made = trained(module, device, *shapes)
        with torch.no_grad():
            return made, module.eval()(*[normal(*shape, device=device) for shape in shapes])

    beside(case)


@works
def cells_twice_differentiated(device: str) -> Any:
    made: list[Any] = []
    for cell in (nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4)):
        module, rows = fill(cell).to(device), normal(2, 3, device=device, requires_grad=True)
        state = module(rows)
        state = module(rows * 2, state)
        hidden = state[0] * state[1] if isinstance(state, tuple) else state
        (slope,) = torch.autograd.grad(hidden.pow(2).sum(), rows, create_graph=True)
        slope.pow(2).sum().backward()
        made += [hidden, slope, rows.grad, *[each.grad for each in module.parameters()]]
    return made


@works
def truncated_backpropagation(device: str) -> Any:
    cell, state, made = fill(nn.LSTMCell(3, 4)).to(device), None, []
    for step in range(6):
        state = cell(normal(2, 3, device=device) + step, state)
        if step % 2:
            state[1].sum().backward()  # the cell state alone
            state = tuple(each.detach() for each in state)
            made.append(state[0])
    return made, [each.grad for each in cell.parameters()]


@works
def attention(device: str) -> Any:
    module = fill(nn.MultiheadAttention(8, 2, batch_first=True)).to(device)
    rows = normal(2, 5, 8, device=device, requires_grad=True)
    causal = torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)
    padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5], device=device)
    made = []
    for options in ({}, {"attn_mask": causal}, {"key_padding_mask": padding}, {"attn_mask": causal, "is_causal": True}):
        for weights in (True, False):
            made.append(module.train()(rows, rows, rows, need_weights=weights, **options))
            with torch.no_grad():
                made.append(module.eval()(rows, rows, rows, need_weights=weights, **options))
    sum(each[0].sum() for each in made[::2]).backward()
    return made, rows.grad, [each.grad for each in module.parameters()]


@works
def encoders_in_eval_mode(device: str) -> Any:
    rows, made = normal(2, 5, 8, device=device), []
    ends = torch.tensor([[False] * 3 + [True] * 2, [False] * 5], device=device)
    gaps = torch.tensor([[False, True] + [False] * 3, [False] * 5], device=device)
    causal = nn.Transformer.generate_square_subsequent_mask(5, device=torch.device(device), dtype=torch.float64)
    for first in (True, False):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=first)
        module = fill(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=not first))
        module = module.to(device).eval()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                made += [module(rows), module(rows, src_key_padding_mask=ends), module(rows, src_key_padding_mask=gaps)]
                made += [module(rows, mask=causal, is_causal=True)]
    return made


@works
def embeddings(device: str) -> Any:
    numbers = torch.tensor([1, 2, 4, 5, 4, 3, 2, 6], device=device)
    starts, made = torch.tensor([0, 3, 3, 5], device=device), []
    for mode in ("sum", "mean", "max"):
        bag = fill(nn.EmbeddingBag(7, 3, mode=mode, padding_idx=2)).to(device)
        made += [bag(numbers, starts), bag(numbers.view(2, 4))]
        made[-1].pow(2).sum().backward()
        made.append(bag.weight.grad)
    table = fill(nn.Embedding(7, 3, padding_idx=0, max_norm=0.5, scale_grad_by_freq=True)).to(device)
    made.append(table(numbers[:4]))
    made[-1].pow(2).sum().backward()
    return made, table.weight, table.weight.grad, F.one_hot(numbers), F.one_hot(numbers, 9)


@works
def resampling(device: str) -> Any:
    rows, made = normal(2, 3, 5, 6, device=device, requires_grad=True), []
    for mode in ("nearest", "nearest-exact", "area", "bilinear", "bicubic"):
        for options in ({"size": (7, 3)}, {"scale_factor": 1.7}, {"scale_factor": 1.3, "recompute_scale_factor": True}):
            made.append(F.interpolate(rows, mode=mode, **options))
    made.append(F.interpolate(rows, scale_factor=0.5, mode="bilinear", antialias=True))
    grid = F.affine_grid(normal(2, 2, 3, device=device), [2, 3, 4, 4], align_corners=False)
    for padding in ("zeros", "border", "reflection"):
        made += [F.grid_sample(rows, grid, mode, padding, align_corners=False) for mode in ("bilinear", "bicubic")]
    sum(each.pow(2).sum() for each in made).backward()  # type: ignore[union-attr]
    return made, rows.grad


@works
def pooling(device: str) -> Any:
    rows = normal(1, 2, 6, 6, device=device, requires_grad=True)
    highest, places = F.max_pool2d(rows, 2, return_indices=True)
    made = [
        highest,
        F.max_unpool2d(highest, places, [2, 2]),
        F.max_pool2d(rows, 3, 1, 1, 2),
        F.lp_pool2d(rows.abs(), 2, 2),
    ]
    made += [
        F.avg_pool2d(rows, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        F.adaptive_avg_pool2d(rows, (3, None)),
    ]
    best, where = F.adaptive_max_pool2d(rows, 2, return_indices=True)
    sum(each.pow(2).sum() for each in [*made, best]).backward()  # type: ignore[union-attr]
    return made, best, places, where, rows.grad


@works
def losses(device: str) -> Any:
    x, y = normal(4, 5, device=device, requires_grad=True), normal(4, 5, device=device).sin()
    targets, sign = torch.tensor([1, 0, 4, -100], device=device), y[:, 0].sign()
    weight, share = y[0].abs(), (y > 0).double()
    made = [
        *(F.cross_entropy(x, targets, weight, label_smoothing=0.1), F.cross_entropy(x, share.softmax(1))),
        *(F.nll_loss(x.log_softmax(1), targets, weight, reduction="none"), F.huber_loss(x, y, delta=0.3)),
        *(F.binary_cross_entropy(x.sigmoid(), share), F.binary_cross_entropy_with_logits(x, share, pos_weight=weight)),
        *(F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), F.smooth_l1_loss(x, y, beta=0.2)),
        *(F.poisson_nll_loss(x, y.abs()), F.gaussian_nll_loss(x, y, y.abs() + 0.1), F.soft_margin_loss(x, y.sign())),
        *(F.cosine_embedding_loss(x, y, sign), F.margin_ranking_loss(x[:, 0], y[:, 0], sign)),
        *(F.triplet_margin_loss(x, y, x.roll(1, 0)), F.hinge_embedding_loss(x, y.sign()), F.l1_loss(x, y)),
        *(F.multi_margin_loss(x, targets.clamp(min=0)), F.multilabel_soft_margin_loss(x, share)),
    ]
    sum(each.sum() for each in made).backward()  # type: ignore[union-attr]
    return made, x.grad


@works
def channels_last(device: str) -> Any:
    module = fill(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 2, bias=False)))
    module = module.to(device).to(memory_format=torch.channels_last)
    rows = normal(2, 3, 5, 5, device=device).to(memory_format=torch.channels_last)
    made = module(rows)
    made.pow(2).sum().backward()
    grads = [each.grad for each in module.parameters()]
    return made, made.stride(), grads, [grad.stride() for grad in grads]


@fails
def inputs_of_another_shape(device: str) -> Any:
    nn.Linear(2, 2).to(device)(torch.ones(1, 3, device=device))


@fails
def other_channels(device: str) -> Any:
    nn.Conv2d(2, 2, 3).to(device)(torch.ones(1, 3, 8, 8, device=device))


@fails
def one_row_in_training(device: str) -> Any:
    nn.BatchNorm1d(3).to(device)(torch.ones(1, 3, device=device))


@fails
def targets_of_another_number(device: str) -> Any:
    F.cross_entropy(normal(2, 3, device=device), torch.tensor([1, 2, 0], device=device))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which PyTorch uses on the CPU
@pytest.mark.filterwarnings("ignore:Converting mask without torch.bool")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("case", WORKING, ids=lambda case: case.__name__)
def test_values_are_those_of_the_cpu(case: Case) -> None:
    beside(case)


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case.__name__)
def test_mistakes_are_told_as_on_the_cpu(case: Case) -> None:
    fails_beside(case)


def test_batch_norm_of_inputs_without_gradients() -> None:
    def case(device: str) -> Any:
        module = fill(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))).to(device)
        module(normal(4, 3, device=device)).pow(2).sum().backward()
        return [each.grad for each in module.parameters()], list(module.buffers())

    beside(case)


def test_numbers_out_of_range_are_told_when_somebody_looks() -> None:
    fails_beside(lambda device: nn.Embedding(7, 3).to(device)(torch.tensor([9], device=device)).sum().item(), late=True)
    targets = torch.tensor([1, 7])
    fails_beside(lambda device: F.cross_entropy(normal(2, 3, device=device), targets.to(device)).item(), late=True)


def test_a_layer_with_hooks_cannot_have_its_padding_left_out() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = nn.TransformerEncoder(layer, 1).eval().to(HERE)
    module.layers[0].register_forward_hook(lambda *_: None)
    padding = torch.tensor([[False, True]], device=HERE)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="enable_nested_tensor=False"):
        module(torch.ones(1, 2, 8, device=HERE), src_key_padding_mask=padding)
