"""Random small models as the text of scripts: a grammar of layers, hooks, losses, optimizers and changes by hand.

A script defines what :mod:`tests.process.plain.fuzzed` trains: ``build``, ``optimizers``, ``loss_of``, ``batches``,
``schedule``, ``change``, and constants. The same seed gives the same text.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Sequence

FUNCTIONS = '''
class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity where inputs are small."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0].abs() < 1)


class Scaled(torch.autograd.Function):
    """The identity, with a scaled gradient."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


class Product(torch.autograd.Function):
    """A product of two tensors; the second one gets half of its gradient."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, (grad * x).mul(0.5)
'''

OPTIMIZERS = (
    "SGD({}, lr=0.1)",
    "SGD({}, lr=0.1, momentum=0.9)",
    "SGD({}, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01)",
    "SGD({}, lr=0.05, momentum=0.8, dampening=0.1, maximize=True)",
    "Adam({}, lr=0.01)",
    "Adam({}, lr=0.01, amsgrad=True, weight_decay=0.1)",
    "AdamW({}, lr=0.01, betas=(0.8, 0.9))",
    "AdamW({}, lr=torch.tensor(0.01))",
    "NAdam({}, lr=0.01)",
    "RAdam({}, lr=0.01)",
    "Adamax({}, lr=0.01)",
    "Adagrad({}, lr=0.05, lr_decay=0.1)",
    "Adadelta({}, lr=1.0)",
    "RMSprop({}, lr=0.01, momentum=0.5, centered=True)",
    "Rprop({}, lr=0.01)",
    "ASGD({}, lr=0.05)",
    "Adafactor({}, lr=0.01)",
)

ACTIVATIONS = (
    "relu",
    "tanh",
    "gelu",
    "silu",
    "softplus",
    "elu",
    "leaky_relu",
    "hardtanh",
    "mish",
    "celu",
    "logsigmoid",
)

PLAIN_STEPS = (
    "h = torch.where(h > 0, h, 0.1 * h)",
    "h = h.masked_fill(h < -1, 0.5)",
    "h = h.clamp(-1, 1.5)",
    "h = h * (h > 0).to(h.dtype)",
    "h = torch.cat([h[:, 1:], h[:, :1]], dim=1)",
    "h = h.roll(1, dims=1) + h",
    "h = h.sort(dim=1).values",
    "h = h.cumsum(1) / h.shape[1]",
    "h = h - h.mean(1, keepdim=True)",
    "h = F.normalize(h, dim=1)",
    "h = h.softmax(1) * 4",
    "h = h - h.logsumexp(1, keepdim=True)",
    "h = h.flip(1)",
    "h = h.view(h.shape[0], 2, -1).transpose(1, 2).flatten(1)",
    "h = h.gather(1, h.detach().argsort(1))",
    "h = h + h.detach()",
    "h = h + (h.round() - h).detach()",
    "h = h.clone()\nh[:, 0] = 0.5",
    "h = h.clone()\nh[:, ::2] += h[:, 1::2].detach()",
    "h = h.clone().mul_(1.5).add_(0.1)",
    "h = h.float().double()",
    "a, b = h.chunk(2, dim=1)\nh = torch.cat([a * b.sigmoid(), b], dim=1)",
    "h = torch.maximum(h, h.flip(1))",
    "h = h * h.std(1, keepdim=True)",
    "h = torch.einsum('bi,bj->bij', h, h.tanh()).mean(2)",
    "h = torch.stack([h, h * 2]).amax(0)",
    "h = h + torch.arange(h.shape[1], device=h.device, dtype=h.dtype) / 10",
    "h = h.unflatten(1, (2, -1)).sum(1).repeat(1, 2)",
    "h = F.dropout(h, 0.0, self.training)",
    "h = h * (2.0 if self.training else 1.0)",
    "with torch.no_grad():\n    scale = h.abs().amax(1, keepdim=True) + 1\nh = h / scale",
    "h = h / (1 + h.shape[0])",
    "h = h - h.mean(0)",
    "h = checkpoint(torch.sin, h, use_reentrant=False)",
    "h = h.addcmul(h, h, value=0.1)",
    "h = torch.lerp(h, h.tanh(), 0.3)",
    "h = h.abs().pow(1.5)",
    "if h.shape[1] > 4:\n    h = h * 1.5",
)
"""Steps from [B, D] to [B, D], D even, that have no parameters."""


class Draft:
    """A script that is being written.

    Args:
        seed: Of all choices.
        without: Topics that are left out.
    """

    def __init__(self, seed: int, without: Sequence[str] = ()) -> None:
        self.choose = random.Random(seed)
        self.seed, self.without = seed, frozenset(without)
        self.init: list[str] = []
        self.forward: list[str] = []
        self.setup: list[str] = []
        self.topics: set[str] = set()
        self.count = 0

    def chance(self, part: float, topic: str = "") -> bool:
        """Tell whether to do something; where so, its topic is among those of the script."""
        chosen = self.choose.random() < part and topic not in self.without
        if chosen and topic:
            self.topics.add(topic)
        return chosen

    def add(self, layer: str) -> str:
        """Give the model a layer, and return how forward calls it."""
        self.count += 1
        self.init.append(f"self.m{self.count} = {layer}")
        return f"self.m{self.count}"

    def say(self, *lines: str) -> None:
        """Add lines to forward."""
        self.forward += [line for text in lines for line in text.split("\n")]


def front(draft: Draft) -> int:
    """Write the front, from inputs to features; return their number."""
    kind = draft.choose.choice(("vector", "vector", "image", "tokens", "sequence"))
    return {"vector": _vector, "image": _image, "tokens": _tokens, "sequence": _sequence}[kind](draft)


def _vector(draft: Draft) -> int:
    draft.setup.append("INPUT = lambda n: torch.randn(n, 6)")
    draft.say(f"h = {draft.add('nn.Linear(6, 8)')}(x)")
    return 8


def _tokens(draft: Draft) -> int:
    draft.setup.append("INPUT = lambda n: torch.randint(0, 9, (n, 4))")
    kind = draft.choose.choice(("nn.Embedding(9, 8)", "nn.Embedding(9, 8, padding_idx=0)", "nn.EmbeddingBag(9, 8)"))
    draft.say(f"h = {draft.add(kind)}(x)" + ("" if "Bag" in kind else ".mean(1)"))
    return 8


def _image(draft: Draft) -> int:
    draft.setup.append("INPUT = lambda n: torch.randn(n, 2, 6, 6)")
    draft.say("h = x")
    channels = 2
    for _ in range(draft.choose.randint(1, 3)):
        kind = draft.choose.randrange(8)
        if kind < 3:
            options = draft.choose.choice(
                ("", ", padding=1, stride=2", ", padding=1, groups=2", ", padding=2, dilation=2")
            )
            options = ", padding=1" if options == "" else options
            draft.say(f"h = {draft.add(f'nn.Conv2d({channels}, 4, 3{options})')}(h)")
            channels = 4
        elif kind == 3:
            draft.say(f"h = {draft.add(f'nn.BatchNorm2d({channels})')}(h)")
        elif kind == 4:
            draft.say(f"h = {draft.add(f'nn.GroupNorm(2, {channels})')}(h).relu()")
        elif kind == 5:
            draft.say("h = F.interpolate(h, size=(4, 4), mode='bilinear', align_corners=False)")
        elif kind == 6:
            draft.say(f"h = {draft.add(f'nn.ConvTranspose2d({channels}, 4, 2)')}(h)")
            channels = 4
        else:
            draft.say(f"h = {draft.add('nn.InstanceNorm2d(' + str(channels) + ', affine=True)')}(h)")
    pool = draft.choose.choice(("F.adaptive_avg_pool2d(h, 2)", "F.adaptive_max_pool2d(h, 2)"))
    draft.say(f"h = {pool}.flatten(1)")
    return channels * 4


def _sequence(draft: Draft) -> int:
    draft.setup.append("INPUT = lambda n: torch.randn(n, 3, 8)")
    draft.say("h = x")
    for _ in range(draft.choose.randint(1, 2)):
        kind = draft.choose.randrange(6)
        if kind == 0:
            layer = draft.add("nn.MultiheadAttention(8, 2, batch_first=True)")
            draft.say(f"h = h + {layer}(h, h, h, need_weights=False)[0]")
        elif kind == 1:
            layer = draft.add("nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)")
            draft.say(f"h = {layer}(h)")
        elif kind == 2:
            draft.say(f"h = {draft.add('nn.GRU(8, 8, batch_first=True)')}(h)[0]")
        elif kind == 3:
            draft.say(f"h = {draft.add('nn.LSTM(8, 4, batch_first=True, bidirectional=True)')}(h)[0]")
        elif kind == 4:
            draft.say(f"h = {draft.add('nn.Conv1d(8, 8, 3, padding=1)')}(h.transpose(1, 2)).transpose(1, 2)")
        else:
            place = draft.add("nn.Parameter(torch.randn(3, 8))")
            draft.say(f"h = F.scaled_dot_product_attention(h + {place}, h, h, is_causal=True)")
    draft.say(draft.choose.choice(("h = h.mean(1)", "h = h[:, -1]", "h = h.amax(1)")))
    return 8


def layer(draft: Draft, width: int) -> int:
    """Write one more layer on features; return how many they are then."""
    made = draft.choose.choice(LAYERS)(draft, width)
    return width if made is None else made


def _linear(draft: Draft, width: int) -> int:
    wide = draft.choose.choice((4, 6, 8))
    bias = draft.choose.choice(("", ", bias=False"))
    draft.say(f"h = {draft.add(f'nn.Linear({width}, {wide}{bias})')}(h)")
    return wide


def _activation(draft: Draft, width: int) -> None:
    draft.say(f"h = F.{draft.choose.choice(ACTIVATIONS)}(h)")


def _norm(draft: Draft, width: int) -> None:
    norm = draft.choose.choice(("LayerNorm({})", "BatchNorm1d({})", "GroupNorm(2, {})", "RMSNorm({})"))
    draft.say(f"h = {draft.add('nn.' + norm.format(width))}(h)")


def _step(draft: Draft, width: int) -> None:
    draft.say(draft.choose.choice(PLAIN_STEPS))


def _residual(draft: Draft, width: int) -> None:
    block = f"nn.Sequential(nn.Linear({width}, 6), nn.Tanh(), nn.Linear(6, {width}))"
    draft.say(f"h = h + {draft.add(block)}(h)")


def _tied(draft: Draft, width: int) -> None:
    name = draft.add(f"nn.Linear({width}, 6)")
    draft.say(f"h = F.linear({name}(h).tanh(), {name}.weight.t())")


def _shared(draft: Draft, width: int) -> None:
    first = draft.add(f"nn.Linear({width}, {width})")
    second = draft.add(f"nn.Linear({width}, {width})")
    draft.init.append(f"{second}.weight = {first}.weight")
    draft.say(f"h = {second}({first}(h).tanh())")


def _einsum(draft: Draft, width: int) -> None:
    weight = draft.add(f"nn.Parameter(torch.randn({width}, {width}) / 3)")
    draft.say(f"h = torch.einsum('bi,ij->bj', h, {weight})")


def _scale(draft: Draft, width: int) -> None:
    draft.say(f"h = h * {draft.add('nn.Parameter(torch.tensor(1.5))')}")


def _unused(draft: Draft, width: int) -> None:
    name = draft.add("nn.Linear(3, 3)")
    use = draft.choose.choice(("", f"h = h + {name}.weight.sum() * 0", f"h = h + {name}.weight.detach().mean()"))
    draft.say(*([use] if use else []))


def _buffer(draft: Draft, width: int) -> None:
    draft.count += 1
    name = f"b{draft.count}"
    kind = draft.choose.randrange(4)
    if kind == 0:
        draft.init.append(f"self.register_buffer('{name}', torch.randn({width}))")
        draft.say(f"h = h + self.{name}")
    elif kind == 1:
        draft.init.append(f"self.register_buffer('{name}', torch.zeros(()))")
        draft.say("if self.training:", f"    self.{name}.add_(1)")
    elif kind == 2:
        draft.init.append(f"self.register_buffer('{name}', torch.zeros({width}), persistent=False)")
        draft.say(f"h = h + self.{name} + 0.1")
    else:
        draft.init.append(f"self.register_buffer('{name}', torch.zeros({width}))")
        update = f"self.{name}.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)"
        draft.say("if self.training:", f"    {update}", f"h = h + {draft.choose.choice(('0', '0.1'))} * self.{name}")


def _cell(draft: Draft, width: int) -> None:
    name = draft.add(f"nn.GRUCell({width}, {width})")
    draft.say("s = torch.zeros_like(h)", "for k in range(2):", f"    s = {name}(h, s)", "h = s")


def _experts(draft: Draft, width: int) -> None:
    experts = draft.add(f"nn.ModuleList(nn.Linear({width}, {width}) for _ in range(2))")
    gate = draft.add(f"nn.Linear({width}, 2)")
    draft.say(f"g = {gate}(h).softmax(1)", f"h = sum(g[:, k : k + 1] * e(h) for k, e in enumerate({experts}))")


def _bilinear(draft: Draft, width: int) -> int:
    draft.say(f"h = {draft.add(f'nn.Bilinear({width}, {width}, 4)')}(h, h.tanh())")
    return 4


def _parametrized(draft: Draft, width: int) -> None:
    how = draft.choose.choice(("weight_norm", "weight_norm", "orthogonal", "spectral_norm"))
    draft.say(f"h = {draft.add(f'parametrizations.{how}(nn.Linear({width}, {width}))')}(h)")


def _checkpointed(draft: Draft, width: int) -> None:
    name = draft.add(f"nn.Sequential(nn.Linear({width}, {width}), nn.Tanh())")
    draft.say(f"h = checkpoint({name}, h, use_reentrant=False)")


def _without_grad(draft: Draft, width: int) -> None:
    name = draft.add(f"nn.Linear({width}, {width})")
    mode = "torch.inference_mode" if draft.chance(0.5, "inference mode") else "torch.no_grad"
    draft.say(f"with {mode}():", f"    g = {name}(h.detach()).relu()", "h = h + g.clone()")


def _custom(draft: Draft, width: int) -> None:
    if draft.chance(1.0, "custom backward"):
        name = draft.add(f"nn.Linear({width}, {width})")
        draft.say(
            draft.choose.choice(
                (
                    f"h = Sign.apply({name}(h))",
                    f"h = Scaled.apply({name}(h), 0.3)",
                    f"h = Product.apply({name}(h), h)",
                )
            )
        )


def _hooked(draft: Draft, width: int) -> None:
    if draft.chance(1.0, "tensor hook"):
        draft.say(draft.choose.choice(("h = h * 1.0", "h = h.tanh()")))
        how = draft.choose.choice(("grad * 0.5", "grad.clamp(-0.01, 0.01)", "grad + 0.001"))
        draft.say("if h.requires_grad:", f"    h.register_hook(lambda grad: {how})")


def _inner_gradient(draft: Draft, width: int) -> None:
    if draft.chance(1.0, "inner gradient"):
        draft.say("v = h.detach().requires_grad_()", "with torch.enable_grad():")
        draft.say("    h = h + torch.autograd.grad(v.sin().sum(), v, create_graph=True)[0]")


LAYERS: tuple[Callable[[Draft, int], int | None], ...] = (
    *(_linear,) * 4,
    *(_activation,) * 4,
    *(_step,) * 8,
    *(_norm,) * 2,
    *(_buffer,) * 2,
    *(_custom,) * 2,
    _residual,
    _tied,
    _shared,
    _einsum,
    _scale,
    _unused,
    _cell,
    _experts,
    _bilinear,
    _parametrized,
    _checkpointed,
    _without_grad,
    _hooked,
    _inner_gradient,
)


def head(draft: Draft, width: int) -> str:
    """Write outputs, targets and loss; return the function that makes the loss."""
    last = draft.add(f"nn.Linear({width}, 4)")
    auxiliary = draft.choose.choice(("", "", "dict", "tuple"))
    draft.say(f"y = {last}(h)")
    draft.say({"": "return y", "dict": "return {'y': y, 'h': h}", "tuple": "return y, (h,)"}[auxiliary])
    y = {"": "o", "dict": "o['y']", "tuple": "o[0]"}[auxiliary]
    h = {"": "o", "dict": "o['h']", "tuple": "o[1][0]"}[auxiliary]
    terms, options = _term(draft, y), ""
    if auxiliary or draft.chance(0.2):
        terms += f" + 0.1 * {h}.pow(2).{'sum()' if 'sum' in draft.topics else 'mean()'}"
    if "sum" not in draft.topics and draft.chance(0.2):
        terms += " + 0.01 * sum(p.pow(2).sum() for p in model.parameters())"
    return f"def loss_of(model):\n    def loss(o, t):\n        return {terms}{options}\n\n    return loss\n"


def _term(draft: Draft, y: str) -> str:
    if draft.chance(0.1, "no mean"):
        weights = f"torch.arange(1.0, 5.0, device={y}.device)"
        return draft.choose.choice(
            (
                f"F.cross_entropy({y}, t, weight={weights})",
                f"F.cross_entropy({y}, t, ignore_index=0)",
                f"F.cross_entropy({y}, t, reduction='sum')",
                f"{y}.pow(2).mean().sqrt()",
                f"F.cross_entropy({y} @ {y}.t(), torch.arange({y}.shape[0], device={y}.device))",
            )
        )
    if draft.chance(0.1, "sum"):
        return f"F.cross_entropy({y}, t, reduction='sum')"
    return draft.choose.choice(
        (
            f"F.cross_entropy({y}, t)",
            f"F.cross_entropy({y}, t, label_smoothing=0.1)",
            f"F.mse_loss({y}, F.one_hot(t, 4).to({y}.dtype))",
            f"F.nll_loss({y}.log_softmax(1), t)",
            f"F.smooth_l1_loss({y}.sum(1), t.to({y}.dtype))",
            f"F.binary_cross_entropy_with_logits({y}[:, 0], (t > 1).to({y}.dtype))",
            f"F.multi_margin_loss({y}, t)",
            f"-{y}.log_softmax(1).gather(1, t[:, None]).mean()",
        )
    )


def optimizers(draft: Draft) -> str:
    """Write the optimizers."""
    kind = draft.choose.randrange(6)
    one, two = draft.choose.sample(OPTIMIZERS, 2)
    lines = ["params = [p for p in model.parameters() if p.requires_grad]"]
    if kind == 0:
        lines.append("cut = len(params) // 2 or 1")
        first, second = one.format("params[:cut]"), two.format("params[cut:]")
        lines.append(f"if len(params) < 2:\n    return [torch.optim.{one.format('params')}]")
        lines.append(f"return [torch.optim.{first}, torch.optim.{second}]")
    elif kind == 1:
        groups = "[{'params': params[::2], 'lr': 0.02}, {'params': params[1::2], 'weight_decay': 0.05}]"
        lines.append(f"return [torch.optim.{one.format(groups)}]")
    elif kind == 2:
        lines.append(f"return [torch.optim.{one.format('(params[1:] or params)')}]")
    elif kind == 3 and draft.chance(0.5):
        lines += ["flat = [p for p in params if p.ndim == 2]", "rest = [p for p in params if p.ndim != 2]"]
        lines.append("if not flat or not rest:\n    return [torch.optim.AdamW(params, lr=0.01)]")
        lines.append("return [torch.optim.Muon(flat, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]")
    else:
        lines.append(f"return [torch.optim.{one.format('params')}]")
    return _function("optimizers(model)", lines)


def schedule(draft: Draft) -> str:
    """Write the schedulers: called once, returns what is called after each step."""
    made = draft.choose.choice(
        ("", "", "StepLR(o, 1, gamma=0.5)", "ExponentialLR(o, 0.8)", "LambdaLR(o, lambda n: 1 / (1 + n))")
    )
    if not made:
        return _function("schedule(optimizers)", ["return lambda: None"])
    lines = [f"all = [torch.optim.lr_scheduler.{made} for o in optimizers]", "return lambda: [s.step() for s in all]"]
    return _function("schedule(optimizers)", lines)


def changes(draft: Draft) -> str:
    """Write what is changed by hand before a step."""
    lines = ["pass"]
    if draft.chance(0.15, "hand"):
        pull = "pull()" if draft.chance(0.8) else "pass"
        how = draft.choose.choice(
            (
                "model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})",
                "with torch.no_grad():\n    [p.mul_(0.9) for p in model.parameters()]",
                "with torch.no_grad():\n    next(model.parameters()).clamp_(-0.1, 0.1)",
                "[b.zero_() for b in model.buffers() if b.is_floating_point()]",
            )
        )
        lines = ["if step == 1:", f"    {pull}", textwrap.indent(how, "    ")]
    elif draft.chance(0.15):
        lines = ["for group in (g for o in optimizers for g in o.param_groups):", "    group['lr'] = group['lr'] * 0.7"]
    elif draft.chance(0.08, "mode"):
        lines = ["model.train(step != 1)"]
    return _function("change(step, model, optimizers, pull)", lines)


def build(draft: Draft) -> str:
    """Write what is done to the model when it is made."""
    lines = [f"torch.manual_seed({draft.seed})", "model = Model()"]
    if draft.chance(0.2):
        part = draft.choose.randint(2, 4)
        lines.append(f"for p in list(model.parameters())[::{part}]:\n    p.requires_grad_(False)")
    if draft.chance(0.1):
        lines.append("for m in model.modules():")
        lines.append("    if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):\n        m.eval()")
    first = f"list(model.children())[{draft.choose.randrange(2)}]"
    if draft.chance(0.1, "parameter hook"):
        how = draft.choose.choice(("grad * 0.3", "grad * (grad > 0)", "grad / (1e-3 + grad.norm())"))
        lines.append("for p in list(model.parameters())[::2]:")
        lines.append(f"    if p.requires_grad:\n        p.register_hook(lambda grad: {how})")
    if draft.chance(0.1):
        lines.append(f"{first}.register_forward_pre_hook(lambda m, given: None)")
    if draft.chance(0.1):
        how = "output * 1.5 if isinstance(output, torch.Tensor) else None"
        lines.append(f"{first}.register_forward_hook(lambda m, given, output: {how})")
    if draft.chance(0.06, "module hook"):
        how = "tuple(None if g is None else g * 0.5 for g in given)"
        lines.append(f"list(model.children())[-1].register_full_backward_hook(lambda m, given, of: {how})")
    return _function("build()", [*lines, "return model"])


def constants(draft: Draft) -> list[str]:
    """Return what says how to train."""
    sizes = draft.choose.choice(((12, 12, 12), (12, 12, 12), (12, 12, 12), (8, 8, 6)))  # each size is a capture
    devices = draft.choose.choice((1, 2, 2))
    options: dict[str, object] = {}
    if "sum" in draft.topics:
        options["loss_reduction"] = "sum"
    elif "no mean" not in draft.topics and draft.chance(0.8):
        options["loss_reduction"] = "mean"  # the check of a mean takes two captures more
    if draft.chance(0.3):
        key, value = draft.choose.choice(
            (
                ("update", "host"),
                ("shard_optimizer", True),
                ("sync", "client"),
                ("overlap", True),
                ("trace", False),
                ("check_every", 1),
                ("in_flight", 1),
                ("shares", [0.7, 0.3][:devices]),
            )
        )
        options[key] = value
    stages = devices == 2 and not {"update", "shard_optimizer", "sync", "shares"} & set(options) and draft.chance(0.3)
    schedule = draft.choose.choice(("1f1b", "gpipe", "zb-h1"))
    return [
        f"SIZES = {sizes}",
        f"MICRO_BATCH = {draft.choose.choice((2, 3, 4))}",
        f"DEVICES = {devices}",
        f"STAGES = {schedule!r}" if stages else "STAGES = None",
        f"CLIP = {draft.choose.choice((None, None, 0.1, 1.0))}",
        f"EVALUATE = {draft.chance(0.1)}",
        f"OPTIONS = {options}",
    ]


def write(seed: int, without: Sequence[str] = ()) -> str:
    """Return the text of the script of a seed.

    Args:
        seed: Of all choices.
        without: Topics that are left out: ``custom backward``, ``tensor hook``, ``parameter hook``, ``module hook``,
            ``inference mode``, ``inner gradient``, ``no mean``, ``sum``, ``hand``, ``mode``.
    """
    draft = Draft(seed, without)
    width = front(draft)
    for _ in range(draft.choose.randint(1, 4)):
        width = layer(draft, width)
    loss = head(draft, width)
    made = [loss, optimizers(draft), schedule(draft), changes(draft), build(draft)]
    init = _function("__init__(self)", ["super().__init__()", *draft.init])
    forward = _function("forward(self, x)", draft.forward)
    model = "class Model(nn.Module):\n" + textwrap.indent(f"{init}\n{forward}", "    ")
    plain = constants(draft)
    batches = [
        f"torch.manual_seed({1000 + seed})",
        "return [(INPUT(n), torch.randint(0, 4, (n,))) for n in SIZES]",
    ]
    header = f"# seed {seed}; topics: {', '.join(sorted(draft.topics)) or 'none'}"
    imports = (
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
        "from torch.nn.utils import parametrizations\nfrom torch.utils.checkpoint import checkpoint\n"
    )
    topics = f"TOPICS = {sorted(draft.topics)}"
    parts = [header, imports, *draft.setup, *plain, topics, FUNCTIONS, model, *made, _function("batches()", batches)]
    return "\n".join(parts) + "\n"


def _function(signature: str, lines: Sequence[str]) -> str:
    return f"def {signature}:\n" + textwrap.indent("\n".join(lines), "    ") + "\n"
