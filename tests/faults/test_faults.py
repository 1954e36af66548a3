"""A minute of the campaign; `python tools/faults.py --long` runs all of it."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import KINDS, LONG, SHORT
from faults.runner import Count, run, table


@pytest.mark.parametrize(("kind", "count"), SHORT.items())
def test_a_small_campaign(kind, count):
    (found,) = run({kind: count}, seed=1)
    assert found.tried == count and not found.bad, "\n".join(found.bad[:3])


def test_the_long_campaign_is_long():
    assert KINDS.keys() == SHORT.keys() == LONG.keys()
    assert sum(LONG.values()) >= 40_000 and LONG["kills"] >= 1520 and min(LONG.values()) >= 300


@pytest.fixture
def fault(monkeypatch):
    def put(function):
        monkeypatch.setitem(KINDS, "probe", function)
        return run({"probe": 3}, seed=0)[0]

    return put


class TestRunner:
    def test_a_traceback_is_bad(self, fault):
        found = fault(lambda rng, folder: 1 // 0)
        assert found.tried == 3 and len(found.bad) == 3 and "ZeroDivisionError" in found.bad[0]
        assert "--kind 'probe' --seed 0 --start 2 --count 1" in found.bad[2]

    def test_a_dead_process_is_bad_and_the_next_try_goes_on(self, fault):
        import os
        import signal

        found = fault(lambda rng, folder: os.kill(os.getpid(), signal.SIGKILL))
        assert found.tried == 3 and len(found.bad) == 3 and "status -9" in found.bad[0]

    def test_a_hang_is_bad(self, fault, monkeypatch):
        for limit in ("HANG", "SETUP"):
            monkeypatch.setattr(f"faults.runner.{limit}", 0.3)
        assert "no answer" in fault(lambda rng, folder: time.sleep(60)).bad[0]

    def test_too_much_memory_is_bad(self, fault, monkeypatch):
        monkeypatch.setattr("faults.runner.MEMORY", 20)
        assert "MB" in fault(lambda rng, folder: "handled" if bytearray(200 << 20) else "").bad[0]

    def test_a_try_that_was_stopped_is_not_counted(self, fault, tmp_path):
        def stopped_once(rng, folder):
            if rng.number == 1 and not (tmp_path / "stopped").exists():
                (tmp_path / "stopped").touch()
                raise KeyboardInterrupt
            return "handled"

        found = fault(stopped_once)
        assert (tmp_path / "stopped").exists() and found.tried == 3 and not found.bad

    def test_the_table(self):
        assert table([Count("images", 1200, ["x"])]).splitlines()[1].split() == ["images", "1,200", "1,199", "1"]
