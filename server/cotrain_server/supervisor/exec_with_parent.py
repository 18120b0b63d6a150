"""Wrapper that starts a command which cannot outlive its supervisor. Standard library only; run as a file.

Usage: `python -I -S exec_with_parent.py SUPERVISOR_PID SIGNAL_NUMBER COMMAND…`

The kernel sends the signal when the supervisor has ended for any reason, including `kill -9`. The
setting survives `exec`, so it also applies to a third-party program: redis-server. A
`preexec_fn` would do the same inside the fork of a process with threads, where little is safe.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to its supervisor, then execute the command."""
    supervisor, death_signal, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(death_signal))
    # If the supervisor exited before the line above, no signal arrives.
    if os.getppid() != int(supervisor):
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606  # our own supervisor chose the command


if __name__ == "__main__":
    main(sys.argv[1:])
