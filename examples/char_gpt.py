"""Train a small character-level GPT on a few paragraphs, then let it write.

Causal self-attention, tied input and output embeddings, AdamW with weight decay for matrices only, gradient clipping,
and a learning rate that warms up and then falls along a cosine.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

TEXT = """\
The keeper of the lighthouse rose before the sun, as keepers do, and climbed the hundred and twelve steps to the lamp.
He trimmed the wick, he wiped the glass, and he wrote in the book what the night had brought: wind from the west, two
sails to the north, rain after midnight. Then he made tea and waited for the boat.

The boat came on Tuesdays when the sea was kind, and on Thursdays when it was not. It brought flour and oil, letters
and nails, and once a year a box of apples from his sister, who lived far from the water and could not be made to
understand why a man would want to live in the middle of it.

"It is quiet," he wrote to her, "but it is never still. The rocks are the same every day and the water is never the
same, and between the two I have plenty to look at. When the fog lies on the water I ring the bell, and out of the fog
another bell answers, and then I know that somebody is there, and that they know that I am here."

His sister read the letter twice and sent the apples.
"""


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each after a normalization and with a way around it."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def attend(self, x):
        batch, time, width = x.shape
        split = [part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2)]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*split, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.drop(self.outer(F.gelu(self.inner(self.norm2(x)))))


class GPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int, dropout: float):
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, ids, count: int, temperature: float, draws: torch.Generator):
        """Append characters, each drawn from the model's distribution."""
        self.eval()
        for _ in range(count):
            logits = self(ids[:, -self.context :])[:, -1]
            chances = F.softmax(logits / temperature, dim=-1)
            chosen = torch.multinomial(chances.cpu(), 1, generator=draws)
            ids = torch.cat([ids, chosen.to(ids.device)], dim=1)
        return ids


def make_optimizer(model, lr: float, decay: float):
    """AdamW that shrinks matrices and leaves biases and normalizations alone."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--generate", type=int, default=120, help="characters to write in the end")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    characters = sorted(set(TEXT))
    data = torch.tensor([characters.index(each) for each in TEXT])
    model = GPT(len(characters), args.context, args.width, 4, args.layers, args.dropout).to(device)
    optimizer = make_optimizer(model, args.lr, decay=0.1)
    warmup = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
    )
    draws = torch.Generator().manual_seed(args.seed)

    losses = []
    for step in range(args.steps):
        starts = torch.randint(len(data) - args.context - 1, (args.batch_size,), generator=draws).tolist()
        inputs = torch.stack([data[start : start + args.context] for start in starts]).to(device)
        targets = torch.stack([data[start + 1 : start + args.context + 1] for start in starts]).to(device)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.4f}  gradient norm {norm:.3f}")

    prompt = torch.tensor([[characters.index(each) for each in "The "]], device=device)
    written = model.generate(prompt, args.generate, 0.8, draws)[0].tolist()
    text = "".join(characters[each] for each in written)
    print(text)
    if args.json:
        Path(args.json).write_text(json.dumps({"device": device, "losses": losses, "text": text}))


if __name__ == "__main__":
    main()
