"""`python -m hago`, and the command `hago`: the command line in a process of its own, which Ctrl-C ends in one way.

While the command line and torch are imported, which takes seconds, Python would end with a traceback, or drop the
interrupt where a module that is imported catches it. Until the command begins, nothing can be lost, so that the process
ends at once. During the command Ctrl-C raises KeyboardInterrupt, which `hago.cli.main` handles.
"""

import atexit
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
#: How often a thread of libgomp, which PyTorch computes with, looks for its next work before it sleeps. The default,
#: 300,000, has threads that wait take the time of those that compute, where other processes or the share of a container
#: leave them less than a processor each. With fewer than this, small layers are slower on a quiet machine. It is read
#: once, when PyTorch is imported.
SPINS = "4000"
#: Commands that time what runs in processes of users' own, which seldom keep the memory that they free.
TIMING = (["bench"], ["hardware"])
TEXT = "\nhago: interrupted before the command began; nothing was written, and the same command starts again\n"


def run() -> int:
    """Run the command that the arguments of the process name, and return its exit code."""
    # a shell that starts a process in the background has it ignore the signal
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, _end)

    def begin() -> None:
        from hago.runtime.native import keep_freed_memory  # imports torch, as all commands do

        if listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if sys.argv[1:2] not in TIMING:
            keep_freed_memory(unless_set=True)

    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

    from hago.cli import main

    code = main(before_command=begin)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done, and what Python does at its end takes a moment
    if code == INTERRUPTED:
        # A KeyboardInterrupt that passes through `exec`, of which torch makes use, has Python end by the signal, with
        # no exit code, although it was handled.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(sys.stderr.fileno(), TEXT.encode())
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(run())
