"""The command `vqprompt`, and the same as `python -m vqprompt`.

Ctrl-C ends it without a traceback, also while it starts and while it ends.
"""

import atexit
import os
import signal
import sys


def main() -> None:
    """Run the command."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is to be ignored
    if interruptible:  # half-imported modules would turn a KeyboardInterrupt into errors of any kind
        signal.signal(signal.SIGINT, _leave)
        # at the very end Python would restore the system's handler, with which Ctrl-C kills a command that is done
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # it would look for them in all installed packages
    from vqprompt.commands.app import main as run

    interrupted = []

    def interrupt(*_: object) -> None:
        interrupted.append(True)
        raise KeyboardInterrupt

    try:
        try:
            if interruptible:
                signal.signal(signal.SIGINT, interrupt)
            run()
        finally:
            if interruptible:
                signal.signal(signal.SIGINT, _leave)
    except SystemExit:
        raise
    except BaseException:  # outside of a command, or an import that was interrupted and failed with an error of its own
        if interrupted:
            sys.exit(130)
        raise


def _leave(*_: object) -> None:
    os._exit(130)


if __name__ == "__main__":
    main()
