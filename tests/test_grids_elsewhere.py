"""Grids on other machines: Ray with two nodes, one of which is lost; SLURM through submitit's stand-in."""

from pathlib import Path

import pytest
from conftest import TINY, make_vit

import vqprompt
from vqprompt.backbones.load import save_backbone
from vqprompt.errors import UserError
from vqprompt.paper.grids import find_grid, plan
from vqprompt.paper.on_ray import RayExecutor
from vqprompt.paper.pool import run_all
from vqprompt.paper.results import make_rows, read_runs
from vqprompt.paper.tables import Table
from vqprompt.paper.work import Advanced, Finished, Lost, Started
from vqprompt.result import RunResult
from vqprompt.runs import runner

SMALL = find_grid("cub200", small=True)
MEASURED = ("images/s",)  # the one column that depends on where a run is done


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_backbone(make_vit(TINY), path)
    return path


def small_grid(weights: Path, seeds=(1, 2), **changes):
    settings = {"backbone": str(weights), "epochs": 15, "train_per_class": 8, "test_per_class": 2, **changes}
    return plan(SMALL, ["vq-prompt"], list(seeds), settings)


@pytest.fixture(scope="module")
def grid_here(weights, tmp_path_factory):
    """The runs, done on this machine."""
    out = tmp_path_factory.mktemp("here")
    todo = small_grid(weights)
    assert run_all(todo, out, 1, lambda run, event: None) == {}
    return todo, out


def table_of(out: Path) -> dict[str, list[str]]:
    table = Table(SMALL, [row for row in make_rows(SMALL, read_runs(out), out) if row.runs])
    return {heading: cells for heading, cells in table.columns.items() if heading not in MEASURED}


def what_was_learned(folder: Path) -> tuple:
    result = RunResult.read(folder)
    return result.done, result.accuracy, result.losses, result.prompt_use


def assert_equal(todo, here: Path, there: Path) -> None:
    assert table_of(here) == table_of(there)
    for run in todo:
        assert what_was_learned(here / run.name) == what_was_learned(there / run.name)
        assert (there / run.name / "report.html").is_file(), "every file comes back"


class Notes:
    """A listener that keeps what it hears, and does something at one event."""

    def __init__(self, when=lambda run, event: False, do=lambda run: None):
        self.events, self.when, self.do = [], when, do

    def __call__(self, run, event):
        self.events.append((run.name, event))
        if self.when(run, event):
            self.when = lambda run, event: False
            self.do(run)

    def of(self, kind):
        return [(name, event) for name, event in self.events if isinstance(event, kind)]


def in_third_task(run, event) -> bool:
    return isinstance(event, Advanced) and event.progress.task == 2


def test_ray_loses_a_machine_in_the_middle_and_the_table_is_the_same(grid_here, tmp_path, monkeypatch):
    """Then a machine with another version of the package joins: it is refused before work starts."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    todo, here = grid_here
    monkeypatch.setattr(runner, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)  # Ray lets workers import from the folder that a program is started in
    size = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **size})
    try:
        nodes = [cluster.add_node(num_cpus=1, **size) for _ in range(2)]
        out, seconds = tmp_path / "there", {}

        def lose(run):
            for each in todo:
                seconds[each.name] = RunResult.read(out / each.name).task_seconds
            cluster.remove_node(nodes[0], allow_graceful=False)

        notes = Notes(all_in_second_task(todo), lose)
        executor = RayExecutor(cluster.address, cpus=1)
        assert executor.run(todo, out, notes) == {}
        ((lost, _),) = notes.of(Lost)
        assert len(notes.of(Started)) == len(todo) + 1 and len(notes.of(Finished)) == len(todo)
        assert_equal(todo, here, out)
        assert seconds[lost] and RunResult.read(out / lost).task_seconds[: len(seconds[lost])] == seconds[lost], (
            "it went on from its checkpoint: what was learned before was not learned again"
        )

        other = package_of_another_version(tmp_path / "other")
        cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(other)}, **size)
        with pytest.raises(UserError, match=r"has vqprompt 0\.0\.1, and the work is for"):
            executor.run(todo, tmp_path / "refused", notes)
        with pytest.raises(UserError, match="no machine has 1 CPUs and 1 GPUs"):
            RayExecutor(cluster.address, cpus=1, gpus=1).run(todo, tmp_path / "refused", notes)
        assert not (tmp_path / "refused").exists()
    finally:
        ray.shutdown()
        cluster.shutdown()


def all_in_second_task(todo):
    """True once every run has said that it learns its second task."""
    there = set()

    def when(run, event):
        if isinstance(event, Advanced) and event.progress.task == 1:
            there.add(run.name)
        return len(there) == len(todo)

    return when


def package_of_another_version(folder: Path) -> Path:
    """The package, as links, with another number in it."""
    source, target = Path(vqprompt.__file__).parent, folder / "vqprompt"
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).symlink_to(path)
    (target / "_version.py").unlink()
    (target / "_version.py").write_text('__version__ = "0.0.1"\n')
    return folder
