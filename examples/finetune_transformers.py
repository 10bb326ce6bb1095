"""Fine-tune a Hugging Face BERT on a two-class problem with a hand-written loop.

The model is a small BERT made from a configuration, the sentences are drawn from a seed: words are numbers, some of
them are kind and some are harsh, and the class says which of the two kinds prevails. In the end the model is saved,
loaded again and has to answer as before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

PAD, START, KIND, HARSH, NEUTRAL, WORDS = 0, 1, range(2, 10), range(10, 18), range(18, 100), 100


class Sentences(Dataset):
    """Sentences of random length; the class is 1 where kind words outnumber harsh ones."""

    def __init__(self, count: int, length: int, seed: int):
        draws = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (count,), generator=draws)
        self.ids = torch.randint(NEUTRAL.start, NEUTRAL.stop, (count, length), generator=draws)
        lengths = torch.randint(length // 2, length + 1, (count,), generator=draws)
        for row, label in enumerate(self.labels.tolist()):
            places = torch.randperm(length // 2 - 1, generator=draws)[:4] + 1  # three that count, one against them
            kinds = [KIND, HARSH] if label else [HARSH, KIND]
            for place, kind in zip(places.tolist(), [kinds[0]] * 3 + [kinds[1]], strict=True):
                self.ids[row, place] = int(torch.randint(kind.start, kind.stop, (), generator=draws))
        self.mask = torch.arange(length) < lengths[:, None]
        self.ids[:, 0] = START
        self.ids[~self.mask] = PAD

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {
            "input_ids": self.ids[index],
            "attention_mask": self.mask[index].long(),
            "labels": self.labels[index],
        }


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the logits of all sentences, on the CPU, and the accuracy."""
    model.eval()
    logits, labels = [], []
    for batch in loader:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        logits.append(model(**batch).logits.cpu())
        labels.append(batch["labels"].cpu())
    logits, labels = torch.cat(logits), torch.cat(labels)
    return logits, (logits.argmax(-1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sentences", type=int, default=1024)
    parser.add_argument("--length", type=int, default=24, help="words of the longest sentence")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(
        Sentences(args.sentences, args.length, args.seed), batch_size=args.batch_size, shuffle=True
    )
    test_loader = DataLoader(Sentences(256, args.length, args.seed + 1), batch_size=128)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=args.length,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
        pad_token_id=PAD,
        num_labels=2,
    )
    model = BertForSequenceClassification(config).to(device)
    optimizer = AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    steps = args.epochs * len(train_loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)

    losses = []
    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        logits, accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch + 1}/{args.epochs}  loss {losses[-1]:.4f}  test accuracy {accuracy:.1%}")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = BertForSequenceClassification.from_pretrained(folder).to(device)
    difference = (evaluate(again, test_loader, device)[0] - logits).abs().max().item()
    print(f"saved and loaded: logits differ by {difference:.1e}")
    if args.json:
        results = {"device": str(device), "losses": losses, "accuracy": accuracy, "difference": difference}
        Path(args.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
