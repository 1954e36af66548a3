"""A disk that fills up or may not be written to: one sentence and exit status 2, the same bits after --resume.

An unusable cache only costs the cache: the run ends as it would with one.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

from faults.tiny import METHODS, Steps, config, difference, forked, outcome, reference, run, scene
from vqprompt.commands import app
from vqprompt.research.runs import runner

ERRORS = (errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
NOBODY = 65534


def _command(method: str, out: Path, home: Path, errors: Path, steps: Steps | None = None, resume: bool = False,
             user: int | None = None) -> int:  # fmt: skip
    """`vqprompt run` with the settings of a tiny run, in a child."""

    def work() -> None:
        if steps is not None:
            steps.install()
        if user is not None:
            os.setresuid(user, user, user)
        plain = runner.run
        runner.run = lambda resolved, out, resume, *rest, **named: plain(  # type: ignore[assignment]
            config(method), out, resume, checkpoint_seconds=0, report=False
        )
        os.environ["VQPROMPT_HOME"] = str(home)
        warnings.simplefilter("ignore")
        sys.argv = ["vqprompt", "run", "--out", str(out), *(["--resume"] if resume else [])]
        app.main()

    return forked(work, errors=errors)


def _verdict(status: int, errors: Path, what: str) -> str | None:
    """What is wrong with how a command ended; None if it ended well or with one error in plain words."""
    said = errors.read_text()
    if status == 0:
        return None
    if status != 2 or "Traceback" in said or "error:" not in said:
        return f"bad: {what}: exit status {status}: {said[-2000:]}"
    return None


def _full(rng: random.Random, method: str, folder: Path) -> str:
    """The system refuses one step, or all from one on."""
    expected, number, lasting = reference(method), rng.choice(ERRORS), rng.random() < 0.5
    fatal = rng.randrange(len(expected.steps)) + 1
    what = f"{method}, {errno.errorcode[number]} at step {fatal} ({expected.steps[fatal - 1]}), lasting {lasting}"

    def refuse() -> None:
        if lasting:
            steps.fatal += 1
        raise OSError(number, os.strerror(number))

    steps = Steps(fatal, refuse)
    return _end(method, folder, _command(method, folder / "out", folder / "home", folder / "errors", steps), what)


def _small(rng: random.Random, method: str, folder: Path) -> str:
    """A real file system of a few pages, for the results or for the cache."""
    reference(method)  # made here, so that children find the same images and weights
    place, for_cache = folder / "small", rng.random() < 0.5
    place.mkdir()
    size = rng.randrange(4, 500)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:  # not ours to mount here
        return _full(rng, method, folder)
    try:
        out = folder / "out" if for_cache else place / "out"
        home = place / "home" if for_cache else folder / "home"
        what, errors = f"{method}, {size} kB for the {'cache' if for_cache else 'results'}", folder / "errors"
        status = _command(method, out, home, errors)
        if wrong := _verdict(status, errors, what):
            return wrong
        if for_cache and status:
            return f"bad: {what}: the run ended with {status}: {errors.read_text()[-1500:]}"
        subprocess.run(["mount", "-o", "remount,size=100m", str(place)], check=True)
        return _end(method, folder, status, what, out, home)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def _unwritable(rng: random.Random, method: str, folder: Path) -> str:
    """A folder that belongs to somebody else, or that cannot be one."""
    reference(method)
    out, home, errors, user = folder / "out", folder / "home", folder / "errors", None
    places = ["/proc/x", "/dev/null/x", str(scene() / "tiny.safetensors"), str(folder / ("n" * 300)), "locked", "loop"]
    which, place = rng.choice(("out", "home")), rng.choice(places)
    if place == "locked":
        locked = folder / "locked"
        locked.mkdir(mode=0o555)
        folder.chmod(0o777)
        place, user = str(locked / "x"), NOBODY if os.getuid() == 0 else None
    elif place == "loop":
        (folder / "loop").symlink_to("loop")
        place = str(folder / "loop" / "x")
    if which == "out":
        out = Path(place)
    else:
        home = Path(place)
    what, status = f"{method}, {which}={place[:60]}", _command(method, out, home, errors, user=user)
    if wrong := _verdict(status, errors, what):
        return wrong
    is_file = which == "home" and place == str(scene() / "tiny.safetensors")  # the one cache that is refused
    if (status == 2) != (which == "out" or is_file):
        return f"bad: {what}: exit status {status}: {errors.read_text()[-1500:]}"
    if which == "home" and not is_file and outcome(out) != reference(method).outcome:
        return f"bad: {what}: another end without a cache"
    return "handled"


def _end(method: str, folder: Path, status: int, what: str, out: Path | None = None, home: Path | None = None) -> str:
    """After the space came back: resumed, with the same bits, and nothing left behind."""
    out, home, errors = out or folder / "out", home or folder / "home", folder / "errors"
    if wrong := _verdict(status, errors, what):
        return wrong
    if status and (again := forked(lambda: run(method, out, home, resume=True), errors=errors)):
        return f"bad: {what}: resumed with exit status {again}: {errors.read_text()[-1500:]}"
    found = difference(out, home, reference(method).outcome)
    return "handled" if found is None or (status == 0 and "left behind" in found) else f"bad: {what}: {found}"


def try_disk(rng: random.Random, folder: Path) -> str:
    """One run on a disk that refuses something."""
    method = rng.choice(METHODS)
    return rng.choice((_full, _full, _small, _unwritable))(rng, method, folder)
