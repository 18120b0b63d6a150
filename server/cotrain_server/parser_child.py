"""Program of a child process of the parser: `python -m cotrain_server.parser_child`.

It imports little, so that several start quickly for a burst. The modules of a call are imported with its function.
"""

import os
import pickle
import resource
import signal
import sys
import time

import cotrain_server.blas_threads  # noqa: F401  # its import sets them, before that of numpy
from cotrain_server.errors import BodyTooLarge

#: Limit on address space, part of which is for libraries. The largest accepted bodies take 0.5 GB.
MAX_BYTES = 1024**3
TOO_LARGE = "The request body takes too much memory to read. Send it in several requests."


def main() -> None:
    """Answer calls until the parent closes the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    max_cpu_s = float(sys.argv[1])
    os.nice(10)  # so that heartbeats do not wait for bodies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # printed output must not reach the pipe of answers
    while True:
        try:
            work, args = pickle.load(calls)  # noqa: S301  # of the same program
        except EOFError:
            return
        begin_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # SIGPROF kills this process
        try:
            has_worked, answer = True, work(*args)
        except MemoryError:
            has_worked, answer = False, BodyTooLarge(TOO_LARGE)
        except Exception as error:  # noqa: BLE001  # its caller is in the other process
            has_worked, answer = False, error
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        cpu_s = time.process_time() - begin_s
        pickle.dump((has_worked, answer, cpu_s), answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
        del work, args, answer


if __name__ == "__main__":
    main()
