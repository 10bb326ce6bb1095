"""Checkpoints on disk: what is kept and removed, and what is refused as damaged or foreign."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onebox
from onebox.engine.state import partial_saves
from onebox.errors import CheckpointError, UsageError
from tests.kit.models import CASES, adamw, sgd
from tests.kit.pools import Pools

Make = Callable[[nn.Module], torch.optim.Optimizer]


# ---- what is kept on disk


@pytest.fixture
def saved(pools: Pools, tmp_path: Path) -> Path:
    """A checkpoint folder with one save, of the MLP with AdamW at step 2."""
    save(pools, tmp_path)
    return tmp_path


def save(pools: Pools, folder: Path, times: int = 1, **options: Any) -> list[Path]:
    case = CASES["mlp"]
    model = case.model()
    with onebox.Trainer(model, case.loss, adamw(model), pool=pools(1)) as trainer:
        made = []
        for _ in range(times):
            for batch in case.batches([4, 4]):
                trainer.step(*batch)
            made.append(trainer.save(folder, **options))
    return made


def resume(pools: Pools, path: Path, *, case: str = "mlp", optimizer: Make = adamw) -> int:
    """Resume and return the steps done; the model must be whole, or untouched when this fails."""
    model = CASES[case].model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with onebox.Trainer.resume(path, model, CASES[case].loss, optimizer(model), pool=pools(1)) as trainer:
            return trainer.steps_done
    except CheckpointError:
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        raise


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.feature("Checkpoints: Keep the newest saves and go back to one")
def test_the_newest_two_are_kept_unless_told_otherwise(pools: Pools, tmp_path: Path) -> None:
    made = save(pools, tmp_path, times=3)
    assert made[-1].name == "step-00000006"
    assert names(tmp_path) == ["step-00000004", "step-00000006"]
    save(pools, tmp_path / "all", times=3, keep=None)
    assert len(names(tmp_path / "all")) == 3
    save(pools, tmp_path / "one", times=3, keep=1)
    assert names(tmp_path / "one") == ["step-00000006"]


def test_the_newest_save_counts_and_each_can_be_named(pools: Pools, tmp_path: Path) -> None:
    made = save(pools, tmp_path, times=2)
    assert resume(pools, tmp_path) == 4
    assert resume(pools, made[0]) == 2


@pytest.mark.feature("Checkpoints: Keep the newest saves and go back to one")
def test_a_run_that_goes_back_resumes_on_its_new_branch(pools: Pools, tmp_path: Path) -> None:
    made = save(pools, tmp_path, times=3)  # after steps 2, 4 and 6, of which two are kept
    case = CASES["mlp"]
    model = case.model()
    with onebox.Trainer.resume(made[1], model, case.loss, adamw(model), pool=pools(1)) as trainer:
        trainer.step(*case.batches([4])[0])
        trainer.save(tmp_path)
        assert names(tmp_path) == ["step-00000004", "step-00000005"]
        trainer.step(*case.batches([4])[0])
        trainer.save(tmp_path)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]
    assert resume(pools, tmp_path) == 6


def test_a_step_that_is_saved_twice_has_two_folders(pools: Pools, saved: Path) -> None:
    save(pools, saved)
    assert names(saved) == ["step-00000002", "step-00000002.1"]
    (saved / "step-00000002" / "manifest.json").write_text("damaged")
    assert resume(pools, saved) == 2


def test_what_a_killed_process_left_is_ignored_and_removed(pools: Pools, saved: Path) -> None:
    left = saved / f".writing-here.{partial_saves._kernel()}.999999999.1.0a1b2c3d"
    shutil.copytree(saved / "step-00000002", left)
    other = saved / ".writing-there.0123456789abcdef.999999999.1.0a1b2c3d"  # of a process of another host
    other.mkdir()
    assert resume(pools, saved) == 2
    save(pools, saved)
    assert not left.exists()
    assert other.exists()


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from onebox.engine.state import checkpoint_files as checkpoint
    from onebox.engine.state.checkpoint_files import Checkpoint, Manifest, read, saves, write
    from onebox.trainer_options import Engine, Staging

    folder = Path(sys.argv[1])

    def save(step):
        state = {"model.weight": torch.full((4,), float(step))}
        manifest = Manifest(
            format="onebox-checkpoint", version=checkpoint.VERSION, torch="", step=step, seed=0, precision="fp32",
            clip_grad_norm=None, loss_reduction=None, stale=None, recovery=None, staging=Staging(), engine=Engine(),
            plan=None, optimizer=(), groups=(), numbers=(), extra={}, identity=str(step), parent=None,
        )
        write(folder, Checkpoint(manifest=manifest, state=state, optimizer={}).contents(), keep=1)

    save(1)
    sync = checkpoint.sync
    for last in range(1, 100):
        child = os.fork()
        if not child:
            count = 0
            def counted(path):
                global count
                count += 1
                if count == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                sync(path)
            checkpoint.sync = counted
            save(1 + last)
            os._exit(0)
        killed = os.waitpid(child, 0)[1] != 0
        found = read(folder)
        assert found.state["model.weight"].eq(found.manifest.step).all()
        print(last, killed, found.manifest.step)
        if not killed:
            break
"""


@pytest.mark.feature("Checkpoints: Find a save complete or absent")
def test_a_save_that_is_killed_at_any_moment_leaves_the_one_before(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[1] for row in rows] == ["True"] * (len(rows) - 1) + ["False"]
    assert len(rows) >= 6  # three files, the manifest, the folder, its parent
    steps_found = [int(row[2]) for row in rows]
    assert steps_found[:-2] == [1] * (len(rows) - 2)
    assert steps_found[-1] == len(rows) + 1
    assert names(tmp_path) == [f"step-{steps_found[-1]:08d}"]


@pytest.mark.parametrize("keep", [0, -1])
def test_something_must_be_kept(keep: int, pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"keep={keep}"):
        save(pools, tmp_path, keep=keep)


def test_what_the_user_adds_must_be_json(pools: Pools, saved: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        save(pools, saved, extra={"model": nn.Linear(1, 1)})
    assert names(saved) == ["step-00000002"]


def test_a_folder_that_cannot_be_written_to_is_named(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"could not be written to {tmp_path}/file"):
        save(pools, tmp_path / "file")


# ---- damage


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "manifest.json"
        manifest = json.loads(file.read_text())
        change(manifest)
        file.write_text(json.dumps(manifest))

    return damage


def flip(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def shorten(folder: Path) -> None:
    file = folder / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def escape(manifest: dict[str, Any]) -> None:
    manifest["files"][0]["name"] = "../model.safetensors"


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (flip, "model.safetensors has another checksum"),
    "truncated file": (shorten, r"optimizer.safetensors has \d+ bytes, but the manifest says \d+"),
    "missing file": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    "manifest of zeros": (lambda folder: (folder / "manifest.json").write_bytes(bytes(100)), "is damaged"),
    "half a manifest": (
        lambda folder: (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:99]),
        "manifest.json is damaged, or no manifest of onebox",
    ),
    "manifest of something else": (
        lambda folder: (folder / "manifest.json").write_text('{"format": "other"}'),
        "manifest.json is damaged, or no manifest of onebox",
    ),
    "unknown field": (edit(lambda manifest: manifest.update(more=1)), "manifest.json is damaged"),
    "later version": (edit(lambda manifest: manifest.update(version=99)), "is of version 99"),
    "path out of the folder": (edit(escape), "lists other files"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "holds no checkpoint: no manifest.json"),
}


@pytest.mark.feature("Checkpoints: Find a save complete or absent")
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_says_what_is_wrong(kind: str, saved: Path, pools: Pools) -> None:
    damage, message = DAMAGE[kind]
    damage(saved / "step-00000002")
    with pytest.raises(CheckpointError, match=message) as caught:
        resume(pools, saved)
    assert str(caught.value.path).startswith(str(saved))


def test_no_checkpoint_is_no_checkpoint(tmp_path: Path, pools: Pools) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            resume(pools, path)


def fewer_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [p]} for p in model.parameters()])


@pytest.mark.parametrize(
    ("case", "optimizer", "message"),
    [
        ("cnn", adamw, "belongs to another model"),
        ("tied", adamw, "belongs to another model"),
        ("mlp", sgd, "was written with AdamW, but the optimizer is SGD"),
        ("mlp", fewer_groups, "other parameter groups"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    case: str, optimizer: Make, message: str, saved: Path, pools: Pools
) -> None:
    with pytest.raises(CheckpointError, match=message):
        resume(pools, saved, case=case, optimizer=optimizer)


def test_an_optimizer_of_another_model_is_refused(saved: Path, pools: Pools) -> None:
    model = CASES["mlp"].model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UsageError, match="neither the model's nor the loss's"):
        onebox.Trainer.resume(saved, model, CASES["mlp"].loss, adamw(CASES["mlp"].model()), pool=pools(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_of_other_types_is_refused(saved: Path, pools: Pools) -> None:
    model = CASES["mlp"].model(torch.float32)
    with pytest.raises(CheckpointError, match=r"float64.* there and .*float32.* in the model"):
        onebox.Trainer.resume(saved, model, CASES["mlp"].loss, adamw(model), pool=pools(1))
