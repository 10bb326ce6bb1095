"""Nothing is unpickled at run time, neither by the client nor by a worker, whatever their libraries might do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.faults.scripts import START_S, Script

GUARD = """
import os, pathlib, sys

def imported():
    last = {"onebox.worker.process.main": "main", "onebox.engine.trainer": "Trainer"}  # of a worker, and of the script
    return any(hasattr(sys.modules.get(module), name) for module, name in last.items())  # so all imports are done

def refuse(event, arguments):
    if event == "pickle.find_class" and imported():
        raise RuntimeError(f"unpickles {arguments}")

def mark():
    (pathlib.Path(__file__).parent / "guarded" / str(os.getpid())).touch()

sys.addaudithook(refuse)  # which forks have, too
mark()
os.register_at_fork(after_in_child=mark)
"""
"""Python imports ``sitecustomize`` when it starts, in the script and in what forks the workers that it starts.

A worker gets few of its parent's variables, so the guard finds its folder by its own place."""

RUN = """
import pickle, tempfile
path = tempfile.mkdtemp(dir=os.environ["SAVED"])
with open_pool("cpu*2", threads=1) as pool:
    for sync in ("workers", "client"):
        with trainer_on(pool, sync, metrics={"loss": parts()[1]}, check_every=1) as trainer:
            steps(trainer, 3)
            trainer.evaluate([batch(0)])
            trainer.save(path)
        model, loss, optimizer = parts(seed=1)
        with onebox.Trainer.resume(path, model, loss, optimizer, pool=pool) as trainer:
            steps(trainer, 5)
            trainer.pull()
    print(*pool.process_ids)
try:
    pickle.loads(pickle.dumps(torch.Size([1])))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.feature("Security: Unpickle nothing from wires and files")
def test_nothing_is_unpickled_at_run_time(tmp_path: Path) -> None:
    hooks, guarded, saved = tmp_path / "hooks", tmp_path / "hooks" / "guarded", tmp_path / "saved"
    guarded.mkdir(parents=True)
    saved.mkdir()
    (hooks / "sitecustomize.py").write_text(GUARD)
    with Script(tmp_path, RUN, environment={"SAVED": str(saved)}, paths=[hooks]) as script:
        status, output, errors = script.end(START_S)
        assert (status, errors) == (0, "")
        workers, refused = output.splitlines()
        assert refused.startswith("unpickles")
        processes = {script.pid, *map(int, workers.split())}
        assert processes <= {int(path.name) for path in guarded.iterdir()}
