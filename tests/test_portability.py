"""A system that is not Linux: no call on the ordinary path that only POSIX systems have. Faked, not run there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import command_environment
from test_images import fill

from vqprompt.core import cache, files
from vqprompt.core.backbones.registry import backbones_folder
from vqprompt.core.errors import UserError
from vqprompt.core.runtime import device as devices
from vqprompt.core.runtime.device import Runtime, pick_device, pick_precision

# Libraries are imported first: they have other code for Windows, which they do not choose here.
ELSEWHERE = """
import os, shutil, signal, sys
import filelock, platformdirs, psutil, torch, sklearn, scipy.linalg, PIL.Image, multiprocessing.connection, subprocess
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("pread", "pwrite", "posix_fallocate", "nice", "sched_getaffinity", "kill", "fork", "mkfifo", "sysconf",
             "statvfs", "getuid", "geteuid", "O_NOCTTY", "O_DIRECTORY", "link", "setsid"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "alarm"):
    if hasattr(signal, name):
        delattr(signal, name)
shutil._use_fd_functions = False  # Windows has no functions for opened folders
psutil.pid_exists = lambda process: process in psutil.pids()  # on Linux it asks os.kill
opened = os.open
def windows_open(path, *given, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied")
    return opened(path, *given, **named)
os.open = windows_open
from vqprompt.__main__ import main
for words in sys.argv[1:]:
    sys.argv = ["vqprompt", *words.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (words, ended.code)
"""


@pytest.mark.slow
def test_everyday_commands_need_nothing_that_only_posix_has(tmp_path, home):
    fill(tmp_path / "files", splits=("train", "test"))
    commands = [
        "learn m.vqp files", "show m.vqp", "predict m.vqp files/test", "test m.vqp files/test", "check files/train",
        "forget m.vqp cat", "undo m.vqp", "cache", "datasets",
        "run --data files --out out --tasks 2 --epochs 1 --size 14 --method vq-prompt", "cache --clear",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *commands], cwd=tmp_path, env=command_environment(home), capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "knows 2 classes" in done.stdout and (tmp_path / "out" / "metrics.json").exists()


@pytest.fixture
def apple(monkeypatch):
    """A machine with Apple's GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def test_auto_takes_apples_gpu_in_fp32(apple):
    assert pick_device("auto").type == "mps"
    assert pick_precision("auto", torch.device("mps")) is torch.float32


def test_what_needs_float64_stays_on_the_cpu_of_an_apple(apple, monkeypatch):
    assert Runtime.pick("auto").device.type == "cpu"
    monkeypatch.setattr(devices, "pick_device", torch.device)
    with pytest.raises(UserError, match=r"device 'mps' has no float64, which is needed here; give auto or cpu"):
        Runtime.pick("mps")


class TestCacheFolder:
    @pytest.fixture(autouse=True)
    def person(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("VQPROMPT_HOME", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    def test_where_the_system_wants_it(self, tmp_path):
        assert cache.cache_folder() == tmp_path / "xdg" / "vqprompt"

    def test_where_the_user_says(self, tmp_path, monkeypatch):
        monkeypatch.setenv("VQPROMPT_HOME", "~/mine")
        assert cache.cache_folder() == tmp_path / "mine" and backbones_folder() == tmp_path / "mine" / "backbones"
        monkeypatch.setenv("VQPROMPT_HOME", "")
        assert cache.cache_folder() == tmp_path / "xdg" / "vqprompt"


def test_a_device_is_never_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"pipe: cannot be written .it is a pipe, socket or device.; choose another"):
        files.write_atomically(tmp_path / "pipe", "text")
    assert Path(tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1
