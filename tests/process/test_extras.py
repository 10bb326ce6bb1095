"""Without optional packages: a clear line and exit status 2 where one is needed, and no difference anywhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from onebox.extras import PACKAGES
from onebox.plan import Plan

WITHIN_S = 240.0

SITE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=root)

sys.meta_path.insert(0, Absent())
"""
"""Code that Python runs before anything else, so that it does not find some packages."""

EVERY = tuple(package.module for package in PACKAGES)


def site(folder: Path, absent: tuple[str, ...]) -> str:
    """Return a ``PYTHONPATH`` with which a process, and the workers that it starts, lack some packages."""
    path = folder / "-".join(("without", *absent))
    path.mkdir(exist_ok=True)
    (path / "sitecustomize.py").write_text(SITE.format(absent=absent))
    return str(path)


def python(
    folder: Path, *arguments: str, absent: tuple[str, ...] = EVERY, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder without some packages."""
    environment = {**os.environ, "PYTHONPATH": site(folder, absent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


COMMANDS = {
    "plot": "plan --model mlp --pool sim*2 --figure plan.svg",
    "images": "train --data folder:pictures --pool cpu",
    "agent": "serve --metrics-port 0 --allow-root --bind 127.0.0.1",
    "data": "train --data parquet:table.parquet --pool cpu",
    "cluster": "devices --pool ray",
}
"""A command for each extra that a command can ask for."""

CALLS = f"""
import contextlib, importlib, io, json, pkgutil, sys
import onebox
from onebox.cli import main

def walk(package):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("__main__", "onebox.integrations")):  # these need frameworks, which are no extras
            found = importlib.import_module(module.name)
            if module.ispkg:
                walk(found)

walk(onebox)
said = {{}}
for extra, line in {COMMANDS!r}.items():
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(line.split())
    said[extra] = [status, errors.getvalue()]
said["modules"] = len([name for name in sys.modules if name.startswith("onebox.")])
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of the commands in a process that has none of the packages, and has imported all modules."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("a", "b"):
        (folder / "pictures" / name).mkdir(parents=True)
        (folder / "pictures" / name / "1.png").write_bytes(b"not looked at")
    (folder / "table.parquet").write_bytes(b"not looked at")
    found: dict[str, Any] = json.loads(python(folder, "-c", CALLS).stdout.splitlines()[-1])
    return found


@pytest.mark.feature("Installation: Do without optional packages")
@pytest.mark.parametrize("extra", COMMANDS)
def test_a_command_that_needs_one_says_so(said: dict[str, Any], extra: str) -> None:
    status, text = said[extra]
    assert status == 2, text
    assert text.startswith("onebox: ") and text.count("\n") == 1
    assert text.endswith(f"which is not installed: pip install 'onebox[{extra}]'\n")


def test_every_module_is_imported_without_them(said: dict[str, Any]) -> None:
    assert said["modules"] > 200


@pytest.mark.feature("Installation: Do without optional packages")
def test_the_demo_works_without_them(tmp_path: Path) -> None:
    demo = "-m onebox train --data digits --model cnn --epochs 1"
    done = python(tmp_path, *demo.split())
    assert not done.stderr
    assert "test accuracy" in done.stdout
    assert "summary.json" in done.stdout.splitlines()[-1]


def test_a_run_by_a_plan_leaves_figures_out_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(Plan.data_parallel([0, 1], [0.5, 0.5]).to_json())
    line = "-m onebox train --model mlp --epochs 1 --pool cpu*2 --threads 1 --plan plan.json --run run"
    done = python(tmp_path, *line.split(), absent=("matplotlib",))
    said = "no figures: the figure of a step needs matplotlib, which is not installed: pip install 'onebox[plot]'"
    assert said in done.stdout.splitlines()
    assert (tmp_path / "run" / "summary.json").exists()
    assert not list((tmp_path / "run").glob("*.png"))


PICTURES_IN_A_TABLE = """
import sys
import onebox
from onebox.feed.sources import Parquet

numbers = Parquet("x.parquet", inputs="size", targets="label")
print([int(value) for value in numbers.decode(numbers.read(1), 1)], flush=True)
pictures = Parquet("x.parquet", inputs="image", targets="label")
with onebox.Feed(pictures, batch_size=2, process=2, process_by=sys.argv[1], on_error="skip") as feed:
    next(iter(feed.epoch(0)))
"""

ON_SLOW_LINKS = """
import json, os, sys
import torch
import onebox
from onebox.pool.network import client_bandwidth
from onebox.wire import codecs

onebox.Pool.near = lambda pool, worker: False
client_bandwidth.measure_client_bandwidth = lambda pool, workers: dict.fromkeys(workers, 1e6)
torch.manual_seed(0)
images = torch.zeros(64, 3072, dtype=torch.uint8)
images[:, ::7] = torch.randint(256, (64, 439), dtype=torch.uint8)
classes = torch.randint(10, (64,))

def train(of_workers):
    os.environ["PYTHONPATH"] = of_workers
    torch.manual_seed(1)
    model = torch.nn.Linear(3072, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = torch.nn.functional.cross_entropy
    with (
        onebox.open("cpu", threads=1) as pool,
        onebox.Trainer(model, loss, optimizer, pool=pool, on_device=lambda x: x.float() / 255) as trainer,
    ):
        losses = [trainer.step(images, classes).item()]
        before = sum(pool.sent_bytes)
        losses.append(trainer.step(images, classes).item())
        packed = sum(pool.sent_bytes) - before < images.nbytes
        return {"client": codecs(), "worker": pool.devices[0].codecs, "losses": losses, "packed": packed}

print(json.dumps([train(path) for path in sys.argv[1:]]))
"""


def test_codecs_that_one_side_lacks_are_not_used(tmp_path: Path) -> None:
    every, none = ["lz4", "zstd"], ("lz4", "zstandard")
    whole, bare = site(tmp_path, ()), site(tmp_path, none)
    here = json.loads(python(tmp_path, "-c", ON_SLOW_LINKS, whole, bare, absent=()).stdout)
    here += json.loads(python(tmp_path, "-c", ON_SLOW_LINKS, whole, absent=none).stdout)
    found = [(run["client"], run["worker"], run["packed"]) for run in here]
    assert found == [(every, every, True), (every, [], False), ([], every, False)]
    assert here[0]["losses"] == here[1]["losses"] == here[2]["losses"]


@pytest.mark.parametrize("by", ["threads", "processes"])
def test_pictures_in_a_table_need_pillow_and_numbers_do_not(tmp_path: Path, by: str) -> None:
    images = pa.array([b"not looked at"] * 4, pa.binary())
    parquet.write_table(
        pa.table({"image": images, "size": [7, 8, 9, 10], "label": [0, 1, 0, 1]}), tmp_path / "x.parquet"
    )
    done = python(tmp_path, "-c", PICTURES_IN_A_TABLE, by, absent=("PIL",), check=False)
    assert done.stdout == "[8, 1]\n"
    assert done.returncode == 1
    said = next(line for line in done.stderr.splitlines() if line.startswith("onebox.errors.MissingExtra: "))
    assert said.endswith("Reading pictures needs pillow, which is not installed: pip install 'onebox[images]'")
