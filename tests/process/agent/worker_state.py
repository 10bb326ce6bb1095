"""A program that prints, as JSON, what a worker is that was started from scratch, and one that a zygote has forked; its
argument is the user of both, if they have one of their own.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from onebox.pool.errors import WorkerLocation
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.pool.launch.worker_user import WorkerUser
from onebox.pool.launch.zygotes import ForkedWorker, ZygoteProcess, worker_environment
from onebox.wire import new_keys
from onebox.worker import WorkerConfig
from tests.kit.waiting import until

WAIT_S = 60.0

PATCH = """
import sys
if {"onebox.worker", "onebox.worker.process.zygote"} & {*sys.orig_argv}:
    import os, socket
    import onebox.worker.process.main as module

    def refused(what, *given):
        try:
            what(*given)
        except OSError as error:
            return error.errno
        return 0

    class Probe(module.WorkerServer):
        def serve(self):
            calls = {
                "read": (open, "/etc/passwd"),
                "write": (open, "/tmp/written", "w"),
                "connect": (socket.create_connection, ("127.0.0.1", 1)),
                "signal": (os.kill, os.getppid(), 0),
                "memory": (open, f"/proc/{os.getppid()}/maps"),
                "fork": (os.fork,),
                "root": (os.setuid, 0),
            }
            print("probed", {name: refused(*call) for name, call in calls.items()}, file=sys.stderr, flush=True)
            super().serve()

        def send_to_client(self, *message):
            print("serving", file=sys.stderr, flush=True)
            return super().send_to_client(*message)

    module.WorkerServer = Probe
"""
"""Has workers print, before they serve, which errors they get where they try what they must not do, and, once all that
serves is there, that they do.
"""

STATUS = (
    "Name",
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "Threads",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Cpus_allowed_list",
)


class Spawner:
    """Forks workers of one zygote, whatever their environment."""

    def __init__(self, zygote: ZygoteProcess) -> None:
        self._zygote = zygote

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None
    ) -> ForkedWorker:
        return self._zygote.fork_worker(stderr, account)


def main() -> None:
    account = WorkerUser(int(sys.argv[1]), int(sys.argv[1])) if len(sys.argv) > 1 else None
    environment = worker_environment(1, account)
    zygote = ZygoteProcess(environment, users=account is not None)
    assert zygote.wait_ready(WAIT_S), zygote.last_words()
    found = {"zygote": state(zygote.pid)}
    for name in ("started", "forked"):
        keys = new_keys()
        config = WorkerConfig("cpu", 1, keys.public, keys.secret, keys.public, quota_bytes=1 << 26, owner=os.getpid())
        place = WorkerLocation(worker=0, host="localhost", device="cpu")
        worker = WorkerProcess(place, config, account, None if name == "started" else Spawner(zygote))
        worker.ports()
        until(lambda: "serving" in worker.last_words())  # noqa: B023 - it is called at once
        found[name] = {**state(worker.pid), "words": worker.last_words()}
        worker.close(grace_s=0.0)
    print(json.dumps(found))
    zygote.close()


def state(process: int) -> dict[str, Any]:
    """Return what a process is, without what differs from one process to the next."""
    proc = Path(f"/proc/{process}")
    lines = (line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
    fields = {name: value for name, value in lines if name in STATUS}
    files = ("limits", "environ", "cgroup", "oom_score_adj", "loginuid", "sessionid", "timerslack_ns")
    return {
        **fields,
        **{name: (proc / name).read_text() for name in files if (proc / name).exists()},
        "namespaces": [os.readlink(each) for each in sorted((proc / "ns").iterdir())],
        "folders": [os.readlink(proc / name) for name in ("cwd", "root")],
        "descriptors": descriptors(proc),
        "leads its session": os.getsid(process) == os.getpgid(process) == process,
        "owner of its memory": (proc / "maps").stat().st_uid,
        "priority": os.getpriority(os.PRIO_PROCESS, process),
        "scheduler": os.sched_getscheduler(process),
    }


def descriptors(proc: Path) -> list[tuple[str, str]]:
    """Return what is open; looked at again where something has been closed meanwhile."""
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            return sorted(map(descriptor, (proc / "fd").iterdir()))
        except FileNotFoundError:
            if time.monotonic() > end_s:
                raise


def descriptor(link: Path) -> tuple[str, str]:
    """Return what is open, without numbers, and how."""
    info = (link.parent.with_name("fdinfo") / link.name).read_text()
    flags = next(line.split()[1] for line in info.splitlines() if line.startswith("flags"))
    return re.sub(r"\d+", "", os.readlink(link)), flags


if __name__ == "__main__":
    main()
