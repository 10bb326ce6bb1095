"""Do the scripts of pytorch/examples, and timm's train.py, run on a pool as they are?

Each is run under ``onebox run`` on two CPU workers, one on four, in a copy of its folder, with small numbers of epochs
where it has such an option. torchvision is the stand-in beside this file, with digits in the place of MNIST; timm
trains on digits in files. A row whose data or packages are absent is left out.

    git clone https://github.com/pytorch/examples
    git clone https://github.com/huggingface/pytorch-image-models
    pip install hydra-core boto3  # of minGPT-ddp
    python benchmarks/pytorch_examples.py examples --timm pytorch-image-models
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from common import commit, finish, machine, show
from PIL import Image

from onebox.feed.datasets.in_memory import load_digits

STANDINS = Path(__file__).parent / "standins"
WITHIN_S = 300.0
DEVICES = 2


class Row(NamedTuple):
    """A script.

    Args:
        folder: Its folder in the clone.
        command: The script and its arguments, after ``onebox run``.
        needs: A file of the folder without which it is left out.
        packages: What it imports, and without which it is left out.
        devices: The number of CPU workers.
    """

    folder: str
    command: str
    needs: str = ""
    packages: tuple[str, ...] = ()
    devices: int = DEVICES


RANKS = f"torchrun --nproc-per-node {DEVICES}"
MINGPT = (
    "main.py data_config.path=data/input.txt data_config.truncate=0.005 gpt_config.n_layer=2 gpt_config.n_embd=64 "
    "trainer_config.max_epochs=1 trainer_config.save_every=1"
)
ROWS = (
    Row("mnist", "main.py --epochs 1 --dry-run"),
    Row("mnist_rnn", "main.py --epochs 1 --dry-run --accel"),
    Row("mnist_forward_forward", "main.py --epochs 2 --train_size 500 --test_size 200"),
    Row("mnist_hogwild", "main.py --epochs 1 --dry-run --cuda"),
    Row("siamese_network", "main.py --epochs 1 --dry-run"),
    Row("vae", "main.py --epochs 1"),
    Row("dcgan", "main.py --dataset fake --accel --dry-run"),
    Row("regression", "main.py"),
    Row("word_language_model", "main.py --epochs 1 --dry-run --accel", "data/wikitext-2/train.txt"),
    Row("word_language_model", "main.py --epochs 1 --dry-run --accel --model Transformer", "data/wikitext-2/train.txt"),
    Row("distributed/ddp", f"{RANKS} example.py"),
    Row("distributed/ddp-tutorial-series", f"{RANKS} multigpu_torchrun.py 2 1"),
    Row("distributed/FSDP2", f"{RANKS} example.py"),
    Row("distributed/FSDP2", f"{RANKS} example.py --explicit-prefetching --mixed-precision --dcp-api"),
    Row("distributed/tensor_parallelism", f"{RANKS} tensor_parallel_example.py"),
    Row("distributed/tensor_parallelism", f"{RANKS} sequence_parallel_example.py"),
    Row("distributed/tensor_parallelism", "torchrun --nproc-per-node 4 fsdp_tp_example.py", devices=4),
    Row("distributed/minGPT-ddp/mingpt", f"{RANKS} {MINGPT}", "data/input.txt", ("hydra", "boto3", "fsspec")),
)


TIMM = (
    "train.py --data-dir digits --model resnet18 --num-classes 10 --img-size 32 --batch-size 16 --epochs 1 "
    "--warmup-epochs 0 --workers 1 --no-aug"
)
TIMM_ROWS = (
    Row("", TIMM, "train.py"),
    Row("", f"{TIMM} --no-prefetcher", "train.py"),
    Row("", f"{RANKS} {TIMM}", "train.py"),
)
PICTURES = 64


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="folder of a clone of pytorch/examples")
    parser.add_argument("--timm", type=Path, help="folder of a clone of huggingface/pytorch-image-models")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    found, table, left_out = {}, [], []
    rows = [(options.clone / row.folder, row) for row in ROWS]
    rows += [(options.timm, row) for row in TIMM_ROWS if options.timm]
    for folder, row in rows:
        name = f"{folder.name} {row.command}"
        if (row.needs and not (folder / row.needs).is_file()) or not all(map(find_spec, row.packages)):
            left_out.append(name)
            continue
        begin_s = time.monotonic()
        status, said = run(folder, row.command, row.devices, digits=row in TIMM_ROWS)
        seconds = round(time.monotonic() - begin_s, 1)
        found[name] = {"works": status == 0, "seconds": seconds, "said": said}
        table.append([folder.name, row.command, "works" if status == 0 else f"fails ({status})", f"{seconds}"])
    show("Scripts on CPU workers", ["folder", "command", "", "seconds"], table)
    failed = sum(not each["works"] for each in found.values())
    result = {"works": len(found) - failed, "failed": failed, "left_out": left_out, "rows": found}
    finish({**result, "machine": machine(), "commit": commit()}, as_json=options.json)


def write_digits(folder: Path) -> None:
    """Write pictures of digits into a folder for each label, for training and for validation."""
    digits = load_digits()
    for name, part in (("train", digits.train), ("validation", digits.test)):
        for number in range(PICTURES):
            path = folder / name / str(int(part.labels[number])) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(part.images[number, 0].numpy()).convert("RGB").resize((32, 32)).save(path)


def run(folder: Path, command: str, devices: int, *, digits: bool = False) -> tuple[int, str]:
    """Run a script in a copy of its folder, beside pictures of digits; return its exit status and last line."""
    environment = os.environ | {"PYTHONPATH": str(STANDINS), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(folder, Path(place) / folder.name, ignore=shutil.ignore_patterns(".git"))
        if digits:
            write_digits(copy / "digits")
        line = [sys.executable, "-m", "onebox", "run", "--pool", f"cpu*{devices}", "--threads", "1", *command.split()]
        pipe = subprocess.PIPE
        with subprocess.Popen(line, cwd=copy, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                printed, said = process.communicate(timeout=WITHIN_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # it ends what it has started
                printed, said = process.communicate(timeout=60)
    lines = [line for line in (printed if process.returncode == 0 else said).splitlines() if line.strip(" =")]
    return process.returncode, lines[-1].strip() if lines else ""


if __name__ == "__main__":
    main()
