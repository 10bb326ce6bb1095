"""``python -m onebox.worker``: one worker process; its configuration comes on standard input."""

import gc

gc.disable()  # collecting the garbage of imports takes a fifth of a worker's start; ``main`` enables it again

from onebox.worker.process.main import main  # noqa: E402

if __name__ == "__main__":
    main()
