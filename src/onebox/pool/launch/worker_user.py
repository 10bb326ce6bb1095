"""Whom workers run as: a user with nothing of its own, where root starts them."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebox.errors import UsageError

_PROBE_S = 30.0
_PROBE = "import importlib.util as util, sys; sys.exit(not all(map(util.find_spec, ('onebox', 'torch', 'zmq'))))"


@dataclass(frozen=True)
class WorkerUser:
    """A user of this machine.

    Args:
        name: Its name.
        user: Its number.
        group: The number of its group.
        groups: The numbers of all groups that it is in, such as those that may use GPUs.
        home: Its folder.
    """

    name: str
    user: int
    group: int
    groups: tuple[int, ...]
    home: str

    def options(self) -> dict[str, Any]:
        """Return what lets ``subprocess.Popen`` give up all other rights before the program is run."""
        return {"user": self.user, "group": self.group, "extra_groups": self.groups, "cwd": "/"}


def find_user(name: str) -> WorkerUser:
    """Return a user of this machine.

    Raises:
        UsageError: There is no such user.
    """
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise UsageError(
            f"this machine has no user {name!r}; make one (useradd --system {name}), or name another"
        ) from None
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return WorkerUser(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def worker_user(name: str | None, *, allow_root: bool) -> WorkerUser | None:
    """Return whom an agent's workers are to run as; ``None`` for the agent's own user.

    Args:
        name: What was asked for.
        allow_root: Whether they may run as root.

    Raises:
        UsageError: They would run as root, and may not; or they cannot run as whom was asked for.
    """
    root = os.geteuid() == 0
    if name is None:
        if root and not allow_root:
            raise UsageError(
                "this is root, and so would be the workers, which others send work to: let them run as another user "
                "(--user NAME), or start onebox serve as one; in a container without others there is --allow-root"
            )
        return None
    account = find_user(name)
    if account.user == os.geteuid() and not root:
        return None
    if not root:
        raise UsageError(f"--user {name}: only root can start workers as another user; start onebox serve as {name}")
    if account.user == 0 or account.group == 0:
        raise UsageError(f"--user {name}: that is root, or of root's group; name another user")
    _probe(account)
    return account


def _probe(account: WorkerUser) -> None:
    """Require that a user can run what workers are.

    Raises:
        UsageError: It cannot.
    """
    source = str(Path(__file__).resolve().parents[3])
    environment = {"PYTHONPATH": source, "HOME": account.home}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
            **account.options(),
        )
        works = done.returncode == 0
    except (OSError, subprocess.SubprocessError):
        works = False
    if not works:
        raise UsageError(
            f"--user {account.name}: that user cannot run {sys.executable} with onebox and torch; install them where "
            "it can read them, such as /opt, and not in a home"
        )


__all__ = ["WorkerUser", "find_user", "worker_user"]
