"""``python -m onebox``: the same as the command ``onebox``."""

import sys

from onebox.cli import main

if __name__ == "__main__":
    sys.exit(main())
