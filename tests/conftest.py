"""A tiny ViT, tiny synthetic streams, and a home of its own for every test."""

import atexit
import gc
import multiprocessing
import os
import random
import sys
import tomllib
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait must not spin: tests run beside each other
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))  # NumPy's always spin
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's workers must not starve beside other tests
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # nor be killed because others take memory

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from warm import warm_instead_of_spawned

from vqprompt.commands import app as cli
from vqprompt.core.backbones.load import save_backbone
from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.data.store import Store
from vqprompt.core.data.stream import Dataset, Stream
from vqprompt.research.learner.learner import Learner
from vqprompt.research.training.settings import Training

SPAWNING = multiprocessing.get_context
TINY = ViTConfig(width=32, depth=6, heads=2, patch=14, image_size=28)
QUICK = Training(epochs=2, batch_size=8, lr=0.01, augment="none", test_crop=0.0)


class Killed(BaseException):
    """Not an Exception: as sudden as a kill can be inside one process, and nobody may catch it and tidy up."""


settings.register_profile(
    "vqprompt", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("vqprompt")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, because some tests wait: for a browser, a cluster, a server."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1 if os.environ.get("OMP_NUM_THREADS", "1") == "1" else cores


def pytest_collection_finish():
    """What was imported stays: it need not be searched for garbage again and again, nor at the end."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.freeze)


@pytest.fixture(autouse=True, scope="session")
def whole_session(tmp_path_factory):
    """One thread per process, unless OMP_NUM_THREADS says otherwise; and a home for fixtures that outlive a test."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VQPROMPT_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(multiprocessing, "get_context", warm_instead_of_spawned())
        yield


@pytest.fixture(autouse=True)
def spawned_as_in_production(request, monkeypatch):
    """Tests that are about child processes get real ones."""
    if request.node.get_closest_marker("spawns"):
        monkeypatch.setattr(multiprocessing, "get_context", SPAWNING)


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Caches never touch the user's own, and no test sees another's."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("VQPROMPT_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def fixed_randomness():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def make_vit(config: ViTConfig = TINY, seed: int = 0) -> ViT:
    """Every value random and far from its initial one, so that a forgotten bias, scale or token shows."""
    vit = ViT(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in vit.named_parameters():
            spread = 0.5 if name in ("cls_token", "pos_embed") else p[0].numel() ** -0.5 if p.ndim > 1 else 0.3
            p.copy_(torch.randn(p.shape, generator=generator) * spread + ("norm" in name and "weight" in name))
    return vit.eval().requires_grad_(False)


def make_dataset(
    classes: int = 6, train: int = 8, test: int = 4, side: int = 32, noise: int = 30, name="toy"
) -> Dataset:
    """Every class is a random texture plus noise: easy to learn, different enough to be worth it."""
    rng = np.random.default_rng(5)
    textures = rng.integers(30, 226, (classes, 1, 3, side // 4, side // 4)).repeat(4, 3).repeat(4, 4)
    pixels = textures + rng.integers(-noise, noise + 1, (classes, train + test, 3, side, side))
    labels = np.arange(classes).repeat(train + test)
    is_test = np.tile(np.arange(train + test) >= train, classes)
    store = Store(pixels.astype(np.uint8).reshape(-1, 3, side, side), np.ones(len(labels)), fingerprint="")
    return Dataset(name, [f"class {c}" for c in range(classes)], store, labels, is_test)


def make_stream(tasks=3, seed: int = 1, **settings) -> Stream:
    return Stream(make_dataset(), tasks, seed, **settings)


def make_learner(method: str = "vq-prompt", seed: int = 0, training: Training = QUICK, tasks=3, **options) -> Learner:
    settings = {"tasks": tasks, "seed": seed, "training": training, "device": "cpu", "compile": "off"}
    return Learner(make_vit(), method, **settings, **options)


def tensors_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in learner.method.state_dict().items()}


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def command_environment(home, threads: int = 1) -> dict[str, str]:
    """For real subprocesses: our home, and few threads, so that several can run at once."""
    return {**os.environ, "VQPROMPT_HOME": str(home), "OMP_NUM_THREADS": str(threads), "COLUMNS": "200"}


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory) -> Path:
    """The tiny ViT as a file."""
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_backbone(make_vit(), path)
    return path


def write_entry_points(folder: Path, example: Path) -> None:
    """What pip writes beside the modules of a package: its name, version and entry points."""
    project = tomllib.loads((example / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n{name} = {at}" for group, names in project["entry-points"].items() for name, at in names.items()
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `vqprompt …` in this process: exit status, standard output, standard error."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vqprompt", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "300")
        with pytest.raises(SystemExit) as ended:
            cli.main()
            raise SystemExit(0)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run
