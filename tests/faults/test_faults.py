"""A minute of the campaign; `python tools/faults.py --long` runs all of it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import KINDS, SHORT
from faults.runner import run


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_campaign(kind):
    (found,) = run({kind: SHORT[kind]}, seed=1)
    assert found.tried == SHORT[kind] and not found.bad, "\n".join(found.bad[:3])


HARMS = {
    "a traceback": (lambda rng, folder: 1 // 0, "ZeroDivisionError"),
    "a dead process": (lambda rng, folder: os.kill(os.getpid(), signal.SIGKILL), "status -9"),
    "a hang": (lambda rng, folder: time.sleep(60), "no answer"),
    "memory": (lambda rng, folder: "handled" if bytearray((rng.number + 1) * 100 << 20) else "", "MB"),
    "words": (lambda rng, folder: "bad: it is so", "bad: it is so"),
}


@pytest.mark.parametrize(("harm", "told"), HARMS.values(), ids=HARMS)
def test_the_campaign_notices_what_is_bad_says_how_to_repeat_it_and_goes_on(monkeypatch, harm, told):
    if told == "no answer":
        monkeypatch.setattr("faults.runner.HANG", 0.3)
        monkeypatch.setattr("faults.runner.SETUP", 0.3)
    monkeypatch.setattr("faults.runner.MEMORY", 20)
    monkeypatch.setitem(KINDS, "probe", harm)
    (found,) = run({"probe": 3}, seed=0)
    assert (found.tried, found.handled, len(found.bad)) == (3, 0, 3) and told in found.bad[0]
    assert "--kind 'probe' --seed 0 --start 2 --count 1: " in found.bad[2]


def test_a_try_that_was_stopped_is_not_counted(monkeypatch, tmp_path):
    def stopped_once(rng, folder):
        if rng.number == 1 and not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            raise KeyboardInterrupt
        return "handled"

    monkeypatch.setitem(KINDS, "probe", stopped_once)
    (found,) = run({"probe": 3}, seed=0)
    assert (tmp_path / "stopped").exists() and found.tried == 3 and not found.bad
