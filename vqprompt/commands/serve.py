"""`vqprompt serve`: a page to teach with, and a server that predicts while it learns."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

from vqprompt.commands.console import print_plain
from vqprompt.commands.options import Device, NewBackbone, NewSize, argument, flag, option
from vqprompt.core.errors import UserError


def serve(
    model: Path | None = argument("A model, a folder of them, or the name of a new one (default: my-model.vqp).", None),
    example: bool = flag("--example", "Start with a model that knows 20 kinds of drawings, to try it out."),
    lan: bool = flag("--lan", "Also for phones on the same network: prints a code to scan. Uses https."),
    host: str = option("The address to listen on. One that other machines can reach needs a token.", "127.0.0.1"),
    port: int = option("The port to listen on; 0 takes any free one.", 8000, min=0, max=65535),
    token: str | None = option(
        "A secret that every request must contain. Give it as the variable to hide it from other users of the machine, "
        "who can read command lines.",
        envvar="VQPROMPT_TOKEN",
        show_envvar=True,
    ),
    allow_host: list[str] | None = option("A name that a proxy uses, such as models.example.org.", metavar="NAME"),
    limit: list[str] | None = option("Such as upload_mb=1000; a wrong name lists the limits.", metavar="NAME=NUMBER"),
    size: NewSize = None,
    backbone: NewBackbone = None,
    device: Device = "auto",
    browser: bool = flag("--open", "Open the page in a browser."),
) -> None:
    """Start a web page to teach and ask a model, and an HTTP interface for programs. It predicts while it learns.

    [bold]vqprompt serve garden.vqp[/bold], or [bold]vqprompt serve --example[/bold] to try it
    """
    started = time.monotonic()
    for package in ("fastapi", "httptools", "prometheus_client", "python_multipart", "segno", "uvicorn"):
        if find_spec(package) is None:
            raise UserError(f"serve needs more packages ({package} is missing): pip install 'vqprompt[serve]'")
    from vqprompt.product.model.opening import ModelDefaults
    from vqprompt.product.serve.lan import MEANS, code_to_scan
    from vqprompt.product.serve.server import open_server
    from vqprompt.product.serve.settings import Limits, Settings

    if lan and host != "127.0.0.1":
        raise UserError(f"--lan chooses the address itself; leave out --host {host}")

    def ready(url: str) -> None:
        print_plain(f"ready after {time.monotonic() - started:.0f} s: {url}", style="bold")
        if lan:
            print_plain(f"{code_to_scan(url)[0]}\n{MEANS}")
        elif token is not None:
            print_plain("the page asks for the token; programs send it as Authorization: Bearer TOKEN")
        if example and model is None:
            print_plain("what you teach the example is lost when it stops; vqprompt serve --example NAME.vqp keeps it")
        print_plain("programs: docs at /docs; stop with Ctrl-C")
        if browser:
            import webbrowser

            webbrowser.open(url)

    settings = Settings(
        model, example, host, port, token, Limits.parse(limit or []),
        ModelDefaults.of(backbone, size, device), tuple(n.lower() for n in allow_host or ()), lan,
    )  # fmt: skip
    open_server(settings, print_plain, ready).run()
