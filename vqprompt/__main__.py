"""The command `vqprompt`, and the same as `python -m vqprompt`.

Ctrl-C ends it without a traceback, also while it starts and while it ends.
"""

import os
import signal
import sys


def main() -> None:
    """Run the command."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is to be ignored
    if interruptible:  # half-imported modules would turn a KeyboardInterrupt into errors of any kind
        signal.signal(signal.SIGINT, _leave)
    from vqprompt.commands.app import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:  # outside of a command, such as while its options are read
        sys.exit(130)
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    os._exit(130)


if __name__ == "__main__":
    main()
