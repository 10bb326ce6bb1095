"""The command ``onebox``, for an agent of ``many_groups.py`` that offers more cores than this machine has: its workers
share those that there are."""

import sys

from onebox.agent import host_devices
from onebox.cli import main

CORES = 64

if __name__ == "__main__":
    host_devices.cores = lambda: CORES
    sys.exit(main())
