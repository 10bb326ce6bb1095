"""``python -m onebox.worker``: one worker process; its configuration comes on standard input."""

from onebox.worker.serve import main

if __name__ == "__main__":
    main()
