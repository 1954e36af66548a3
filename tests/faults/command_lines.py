"""Command lines with odd paths, and Ctrl-C at any moment: exit status 0, 2 or 130, and never a traceback."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from faults.tiny import forked
from vqprompt.commands import app
from vqprompt.research.runs import runner

ODD = (
    "", ".", "..", "/", "~", "~nobody/x", "-", "--", "x" * 300, "x/" * 3000, "a\0b", "\udcff.vqp", "\x1b[2J.vqp",
    "größe", " ", "fifo", "folder", "folder/", "loop", "text.vqp", "/proc/nowhere/x", "{0..9}", "[red]", "%s",
)  # fmt: skip
# MODEL, IMAGES, FILE and OUT are places for a path
COMMANDS = (
    "learn MODEL IMAGES", "learn MODEL IMAGES --exclude FILE", "learn MODEL IMAGES --backbone FILE", "show MODEL",
    "learn MODEL IMAGES --as FILE", "show MODEL --json", "rename MODEL cat FILE", "forget MODEL FILE", "undo MODEL",
    "test MODEL IMAGES --out OUT", "check IMAGES --out OUT", "predict MODEL IMAGES", "predict MODEL IMAGES --json",
    "export MODEL --hub OUT", "export MODEL --onnx OUT", "run --data FILE --out OUT", "run --config FILE --out OUT",
    "run --backbone FILE --out OUT", "methods FILE", "bench show FILE --out OUT",
)  # fmt: skip


@functools.cache
def scene() -> Path:
    """A folder with images, a model that has learned them, and what is neither."""
    from vqprompt.product.model.model import Model

    place = Path(tempfile.mkdtemp(prefix="vqprompt-scene-"))
    for label, shade in (("cat", 30), ("dog", 200)):
        (place / "images" / label).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(np.full((9, 9, 3), shade + i, np.uint8)).save(place / "images" / label / f"{i}.png")
    model = Model(size=14)
    model.learn(place / "images")
    model.save(place / "model.vqp")
    (place / "text.vqp").write_text("no model")
    (place / "folder").mkdir()
    return place


def _words(rng: random.Random) -> list[str]:
    words, odd = rng.choice(COMMANDS).split(), rng.choice(ODD)
    places = [i for i, word in enumerate(words) if word.isupper()]
    chosen = rng.choice(places)
    if words[chosen] in ("IMAGES", "OUT") and odd in ("/", "~", ".."):
        odd = "."  # else this machine's own files would be read or written
    usual = {"MODEL": "model.vqp", "IMAGES": "images", "FILE": "text.vqp", "OUT": "out"}
    return [odd if i == chosen else usual.get(word, word) for i, word in enumerate(words)]


def try_command_line(rng: random.Random, folder: Path) -> str:
    """One command with one odd path."""
    words, errors, output = _words(rng), folder / "errors", folder / "output"
    here = folder / "here"
    shutil.copytree(scene(), here)
    os.mkfifo(here / "fifo")
    (here / "loop").symlink_to("loop")

    def work() -> None:
        os.chdir(here)
        os.environ.update(VQPROMPT_HOME=str(folder / "home"), HOME=str(folder / "home"))
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
        runner.run = lambda *given, **named: sys.exit(0)  # type: ignore[assignment]
        sys.argv = ["vqprompt", *words]
        warnings.simplefilter("ignore")
        app.main()

    status = forked(work, errors=errors)
    said, shown = errors.read_bytes() + output.read_bytes(), [word[:50] for word in words]
    if status not in (0, 1, 2) or b"Traceback" in said or (status and not said):
        return f"bad: {shown}: exit status {status}: {said.decode('utf-8', 'replace')[-2500:]}"
    if any(byte < 32 and byte not in b"\n\t\r" for byte in said):
        return f"bad: {shown}: control characters on the terminal: {said[:300]!r}"
    return "handled"


STARTED = "from vqprompt.__main__ import main; print('started', flush=True); main()"
INTERRUPTED = (
    "show model.vqp", "predict model.vqp images", "learn model.vqp images", "methods", "datasets", "cache", "--help",
    "rename model.vqp cat lion", "check images", "test model.vqp images", "run --out out --data images --tasks 2",
)  # fmt: skip


def try_early_interrupt(rng: random.Random, folder: Path) -> str:
    """Ctrl-C at a random moment of a command, most of them while it starts."""
    here = folder / "here"
    shutil.copytree(scene(), here)
    before = (here / "model.vqp").read_bytes()
    words = rng.choice(INTERRUPTED).split()
    path = os.pathsep.join([str(Path(app.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, *words], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "VQPROMPT_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(rng.choice((rng.uniform(0, 1), rng.uniform(0, 6))))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=50)
    if process.returncode not in (0, 130) or b"Traceback" in said or b"Exception ignored" in said:
        return f"bad: {words}: exit status {process.returncode}: {said.decode('utf-8', 'replace')[-2500:]}"
    if words[0] not in ("learn", "rename") and (here / "model.vqp").read_bytes() != before:
        return f"bad: {words}: the model has changed"
    left = [path.name for path in here.iterdir() if path.name.startswith(".")]
    return "handled" if not left else f"bad: {words}: left behind {left}"
