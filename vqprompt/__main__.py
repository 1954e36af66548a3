"""The command `vqprompt`; `python -m vqprompt` does the same."""

import signal


def main() -> None:
    """Ctrl-C before a command begins ends the process without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules are loaded, which catch all kinds of errors
    from vqprompt.commands.app import main as run

    try:
        signal.signal(signal.SIGINT, handler)
        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
