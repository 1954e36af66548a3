"""Grids on other machines: Ray with two nodes, one of which is lost; SLURM through submitit's stand-in."""

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import write_entry_points

import vqprompt
from vqprompt.core.errors import UserError
from vqprompt.core.plugins import Registry
from vqprompt.research.paper import execution
from vqprompt.research.paper.execution import EXECUTORS, Advanced, Failed, Finished, Lost, Started
from vqprompt.research.paper.grids import find_grid, plan
from vqprompt.research.paper.pool import LocalExecutor
from vqprompt.research.paper.table_rows import make_rows, read_runs
from vqprompt.research.paper.tables import make_table
from vqprompt.research.results.result import RunResult
from vqprompt.research.runs import runner

EXAMPLE = Path(__file__).parents[1] / "examples" / "vqprompt-clusters"
sys.path.insert(0, str(EXAMPLE))
import vqprompt_clusters as clusters  # noqa: E402
from vqprompt_clusters import RayExecutor, SlurmExecutor, pack, unpack  # noqa: E402

SMALL = find_grid("cub200", small=True)
MEASURED = ("images/s",)  # the one column that depends on where a run is done


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The package for clusters, as pip would install it: processes can import it, and its entry points are found."""
    folder = tmp_path_factory.mktemp("installed")
    write_entry_points(folder, EXAMPLE)
    vars(EXECUTORS).pop("entry_points", None)  # those that were found before
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLE), str(folder), os.environ.get("PYTHONPATH", "")]))
        yield


def small_grid(weights: Path, seeds=(1, 2), **changes):
    settings = {"backbone": str(weights), "epochs": 1, "train_per_class": 4, "test_per_class": 2, **changes}
    return plan(SMALL, ["vq-prompt"], list(seeds), settings)


@pytest.fixture(scope="module")
def grid_here(tiny_weights, tmp_path_factory):
    """The runs, done on this machine, with one thread as elsewhere: another number rounds in another way."""
    out, todo, threads = tmp_path_factory.mktemp("here"), small_grid(tiny_weights), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert not any(isinstance(event, Failed) for _, event in LocalExecutor(1).run(todo, out))
    finally:
        torch.set_num_threads(threads)
    return todo, out


def table_of(out: Path) -> dict[str, list[str]]:
    table = make_table(SMALL, [row for row in make_rows(SMALL, read_runs(out), out) if row.runs])
    return {heading: cells for heading, cells in table.columns.items() if heading not in MEASURED}


def what_was_learned(folder: Path) -> tuple:
    result = RunResult.read(folder)
    return result.done, result.accuracy, result.losses, result.prompt_use


def assert_equal(todo, here: Path, there: Path) -> None:
    assert table_of(here) == table_of(there)
    for run in todo:
        assert what_was_learned(here / run.name) == what_was_learned(there / run.name)
        assert (there / run.name / "report.html").is_file(), "every file comes back"


class LocalSlurm(SlurmExecutor):
    """submitit's stand-in for SLURM, which starts processes on this machine."""

    cluster = "local"


class Notes:
    """Keeps what happens to runs, and does something at one event."""

    def __init__(self, when=lambda run, event: False, do=lambda run: None):
        self.events, self.when, self.do = [], when, do

    def take(self, events, loss_was_noticed, start_was_heard=None):
        for run, event in events:
            self.events.append((run.name, event))
            if self.when(run, event):
                self.when = lambda run, event: False
                self.do(run)
            if isinstance(event, Started) and start_was_heard is not None:
                start_was_heard.touch()
            if isinstance(event, Lost):
                loss_was_noticed.touch()

    def of(self, kind):
        return [(name, event) for name, event in self.events if isinstance(event, kind)]


def in_second_task(run, event) -> bool:
    return isinstance(event, Advanced) and (event.progress.task or 0) >= 1


@pytest.mark.slow
def test_ray_loses_a_machine_in_the_middle_and_the_table_is_the_same(grid_here, tmp_path, monkeypatch):
    """Then a machine with another version of the package joins: it ends the work."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    todo, here = grid_here
    out, loss_was_noticed, seconds = tmp_path / "there", tmp_path / "noticed", {}
    monkeypatch.setattr(runner, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(clusters, "SECONDS_BETWEEN_MESSAGES", 0.0)
    monkeypatch.setattr(clusters, "work", waits_in_second_task(loss_was_noticed))
    monkeypatch.chdir(tmp_path)  # Ray lets workers import from the folder that a program is started in
    size = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **size})
    try:
        nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1, **size) for _ in range(2))}

        def lose_machine_of(run):
            seconds[run.name] = RunResult.read(out / run.name).task_seconds
            ((_, started),) = [(name, event) for name, event in notes.of(Started) if name == run.name]
            cluster.remove_node(nodes[started.where], allow_graceful=False)

        notes = Notes(in_second_task, lose_machine_of)
        executor = RayExecutor(cluster.address, cpus=1)
        notes.take(executor.run(todo, out), loss_was_noticed)
        assert not notes.of(Failed)
        ((lost, _),) = notes.of(Lost)
        assert len(notes.of(Started)) == len(todo) + 1 and len(notes.of(Finished)) == len(todo)
        assert_equal(todo, here, out)
        assert seconds[lost] and RunResult.read(out / lost).task_seconds[: len(seconds[lost])] == seconds[lost], (
            "it went on from its checkpoint: what was learned before was not learned again"
        )

        other = package_of_another_version(tmp_path / "other")
        cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": f"{other}{os.pathsep}{EXAMPLE}"}, **size)
        with pytest.raises(UserError, match=r"has vqprompt 0\.0\.1 \(source files .*\), and the work needs"):
            list(executor.run(todo, tmp_path / "refused"))
        with pytest.raises(UserError, match="no machine has 1 CPUs and 1 GPUs"):
            list(RayExecutor(cluster.address, cpus=1, gpus=1).run(todo, tmp_path / "too large"))
        assert not (tmp_path / "too large").exists()
    finally:
        ray.shutdown()
        cluster.shutdown()


def waits_in_second_task(signal: Path):
    """What a Ray worker does, but nothing comes from a run's second task until a file is there: no run is over before
    one is lost, however fast or slow machines are. It names its Ray node, because both nodes are on one host."""
    as_it_is, wait = clusters.work, waiting_for(signal)

    def work(job, files):
        import ray

        for item in as_it_is(job, files):
            yield Started(ray.get_runtime_context().get_node_id()) if isinstance(item, Started) else item
            if isinstance(item, Advanced) and (item.progress.task or 0) >= 1:
                wait()

    return work


def waiting_for(path: Path):
    """A function that returns when a file is there. It is a function in a function, because such ones are sent to
    workers as they are; others are imported there, and tests cannot be."""

    def wait() -> None:
        latest = time.monotonic() + 300
        while not path.exists() and time.monotonic() < latest:
            time.sleep(0.05)

    return wait


def package_of_another_version(folder: Path) -> Path:
    """The package, as links, with another number in it."""
    source, target = Path(vqprompt.__file__).parent, folder / "vqprompt"
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).symlink_to(path)
    (target / "_version.py").unlink()
    (target / "_version.py").write_text('__version__ = "0.0.1"\n')
    return folder


@pytest.mark.slow
def test_slurm_goes_on_with_a_job_that_was_killed(grid_here, tmp_path, monkeypatch):
    """Through submitit's stand-in for SLURM, which starts processes on this machine."""
    pytest.importorskip("submitit")
    todo, here = grid_here
    out, start_was_heard, loss_was_noticed, seconds = tmp_path / "there", tmp_path / "heard", tmp_path / "noticed", {}
    monkeypatch.setattr(runner, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(clusters, "SECONDS_BETWEEN_LOOKS", 0.1)
    monkeypatch.setattr(clusters, "SECONDS_BETWEEN_MESSAGES", 0.0)
    monkeypatch.setattr(clusters, "SlurmJob", job_that_waits(start_was_heard, loss_was_noticed))

    def kill(run):
        seconds[run.name] = RunResult.read(out / run.name).task_seconds
        (process,) = jobs_of(out / clusters.SLURM_FOLDER)
        os.kill(process, signal.SIGKILL)

    notes = Notes(in_second_task, kill)
    notes.take(LocalSlurm(cpus=1, at_once=1).run(todo, out), loss_was_noticed, start_was_heard)
    assert not notes.of(Failed)
    ((lost, _),) = notes.of(Lost)
    assert_equal(todo, here, out)
    assert seconds[lost] and RunResult.read(out / lost).task_seconds[: len(seconds[lost])] == seconds[lost]
    (started, event), *_ = notes.of(Started)
    assert started in seconds and event.where


def job_that_waits(start_was_heard: Path, loss_was_noticed: Path):
    """A job that waits for one file when it has started, and for another one in its second task: it says things by
    writing them over what it said before, and here none of the two may be missed."""
    wait_at_start, wait_in_second_task = waiting_for(start_was_heard), waiting_for(loss_was_noticed)

    class Job(clusters.SlurmJob):
        def report(self, event):
            super().report(event)
            if isinstance(event, Started):
                wait_at_start()
            elif isinstance(event, Advanced) and (event.progress.task or 0) >= 1:
                wait_in_second_task()

    return Job


def jobs_of(folder: Path) -> list[int]:
    """Processes that submitit started with scripts in a folder, and that do the work."""
    processes = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                if f"{folder}".encode() in (command := (process / "cmdline").read_bytes()) and b"_submit" in command:
                    processes.append(int(process.name))
    return processes


def test_slurm_asks_for_what_a_run_needs(monkeypatch, tmp_path, grid_here):
    """No SLURM is at hand, so what sbatch would be given is looked at instead."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch here; give the command on a login node"):
        list(SlurmExecutor().run(grid_here[0], tmp_path / "out"))
    (tmp_path / "sbatch").touch(0o755)
    (tmp_path / "srun").touch(0o755)
    executor = SlurmExecutor("gpu-long", cpus=4, gpus=1)._open(tmp_path / "jobs")
    asked = executor._executor.parameters
    assert isinstance(executor._executor, submitit.SlurmExecutor)
    assert (asked["partition"], asked["cpus_per_task"], asked["gpus_per_node"]) == ("gpu-long", 4, 1)
    assert asked["time"] == 24 * 60 and executor._executor.max_num_timeout == clusters.REQUEUES


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--on", "mars"], "--on mars: expected local, ray, ray=HOST:PORT, slurm or slurm=PARTITION"),
        (["--on", "ray="], "expected local, ray"),
        (["--on", "ray=10.0.0.1"], "expected HOST:PORT"),
        (["--on", "ray://10.0.0.1:10001"], "expected local, ray"),
        (["--on", "ray=ray://10.0.0.1:10001"], "expected HOST:PORT"),
        (["--gpus", "1"], "are for other machines"),
        (["--on", "ray", "--gpus", "2"], "a run uses one GPU at most"),
        (["--on", "ray", "--gpus", "-1"], "a run uses one GPU at most"),
        (["--on", "slurm", "--gpus", "0.5"], "SLURM gives whole GPUs"),
    ],
)
def test_places_that_cannot_be_are_refused(command, tmp_path, options, word):
    status, _, err = command("bench", "run", "cub200", "--small", "--out", tmp_path / "out", *options)
    assert status == 2 and word in err and not (tmp_path / "out").exists()


def test_an_address_nobody_answers_is_refused_before_ray_tries(command, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda *given, **named: pytest.fail("Ray itself would try for two minutes"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # so that nobody else takes the port meanwhile
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        on = ["--on", f"ray={address}"]
        status, _, err = command("bench", "run", "cub200", "--small", "--out", tmp_path / "out", *on)
    assert status == 2 and f"--on ray={address}: nobody answers there" in err and "ray start --head" in err


def test_without_the_package_for_clusters_its_name_is_told(command, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "EXECUTORS", Registry("vqprompt.none", execution.Executor, {}))
    status, _, err = command("bench", "run", "cub200", "--small", "--out", tmp_path / "out", "--on", "slurm")
    assert status == 2 and "--on slurm: the package for clusters is missing; pip install" in err


def test_a_parcel_arrives_whole_and_stays_in_its_folder(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "tensorboard").mkdir(parents=True)
    for name in ("checkpoint.json", "state-2.safetensors", "tensorboard/events", ".lock"):
        (there / name).write_text(name)
    here.mkdir()
    (here / "state-1.safetensors").write_text("old")
    (here / ".lock").write_text("ours")
    unpack(pack(there), here)
    names = {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()}
    assert names == {"checkpoint.json", "state-2.safetensors", "tensorboard/events", ".lock"}
    assert (here / ".lock").read_text() == "ours"
    for name in ("../up", "/etc/passwd", "a/../../b", "a\\b"):
        with pytest.raises(UserError, match="leads out of its folder"):
            unpack({name: b""}, here)


def test_tracking_elsewhere_takes_a_server(grid_here, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for executor in (RayExecutor(), LocalSlurm()):
        with pytest.raises(UserError, match="set MLFLOW_TRACKING_URI"):
            list(executor.run(grid_here[0], tmp_path / "out", ["mlflow"]))
