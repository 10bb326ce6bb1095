"""The user that workers run as: one without files or rights of its own, where the launching process is root."""

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
        name: User name.
        user: User id.
        group: Group id.
        groups: Ids of all its groups, such as those that may use GPUs.
        home: Home folder.
    """

    name: str
    user: int
    group: int
    groups: tuple[int, ...]
    home: str

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``subprocess.Popen`` that drop all other rights before the program runs."""
        return {"user": self.user, "group": self.group, "extra_groups": self.groups, "cwd": "/"}


def find_user(name: str) -> WorkerUser:
    """Look up a user of this machine.

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
    """Return the user that an agent's workers are to run as; ``None`` for the agent's own user.

    Args:
        name: The requested user.
        allow_root: Whether workers may run as root.

    Raises:
        UsageError: Workers would run as root, which is not allowed; or they cannot run as the requested user.
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
    """Check that a user can start a worker's Python.

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
