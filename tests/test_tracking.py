"""What trackers receive, read back with their own libraries: everything, exactly once, whatever happens to the run."""

import json
import shutil
import sqlite3
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest
from conftest import Killed

from vqprompt.core.progress import ignore
from vqprompt.research.learner.learner import Learner
from vqprompt.research.results.config import flatten, resolve
from vqprompt.research.runs import runner as runs
from vqprompt.research.runs import tracking

BOTH = ("mlflow", "tensorboard")
TASKS, EPOCHS, IMAGES, BATCH = 3, 2, 12, 4
STEPS = TASKS * EPOCHS * IMAGES // BATCH
SETTINGS = {"data": "quickdraw50", "size": 28, "tasks": [2] * TASKS, "epochs": EPOCHS, "batch_size": BATCH,
            "train_per_class": 6, "test_per_class": 3, "seed": 1}  # fmt: skip


@pytest.fixture(scope="module")
def place(tiny_weights, tmp_path_factory):
    """A store for all tests here: making one takes MLflow a while."""
    folder = tmp_path_factory.mktemp("tracking")
    (folder / "tiny.safetensors").symlink_to(tiny_weights)
    return folder


@pytest.fixture(autouse=True)
def store(place, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.chdir(place)  # artifacts are kept beside
    return mlflow_client()


@pytest.fixture
def track(place, tmp_path):
    def run(name="run", trackers=BOTH, resume=False, progress=ignore, **changes) -> Path:
        config = resolve({**SETTINGS, "backbone": str(place / "tiny.safetensors"), **changes})
        runs.run(config, tmp_path / name, resume, progress, checkpoint_seconds=0, track=trackers)
        return tmp_path / name

    return run


def mlflow_client():
    """The libraries of trackers are imported where they are used: every worker collects these tests, one runs them."""
    from mlflow import MlflowClient

    return MlflowClient()


def mlflow_run(folder: Path):
    return mlflow_client().get_run((folder / "mlflow_run_id.txt").read_text())


def mlflow_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    run, client = mlflow_run(folder), mlflow_client()
    return {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics}  # fmt: skip


def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()


def tensorboard_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    log = events(folder)
    return {name: [(e.step, e.value) for e in log.Scalars(name)] for name in log.Tags()["scalars"]}


def text(folder: Path, name: str) -> str:
    (event,) = events(folder).Tensors(f"{name}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def hparams(folder: Path) -> dict:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    return {name.removeprefix("_hparams_/"): HParamsPluginData.FromString(metadata.plugin_data.content)
            for name, metadata in events(folder).summary_metadata.items() if name.startswith("_hparams_/")}  # fmt: skip


def metrics_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def expected(metrics: dict) -> dict[str, list[tuple[int, float]]]:
    """All that should be there but the losses, which nothing else keeps step by step."""
    points = defaultdict(list)
    for number, row in enumerate(metrics["accuracy"], start=1):
        points[f"accuracy/task_{number:02}"] = [(j, a) for j, a in enumerate(row, start=1) if a is not None]
    points["accuracy/average"] = list(enumerate(metrics["average_accuracy"], start=1))
    return points | {name: [(TASKS, metrics[name])] for name in ("faa", "caa", "forgetting")}


def close(a: dict, b: dict) -> bool:
    """Event files hold single precision."""
    return a == {name: [(step, pytest.approx(value, rel=1e-6)) for step, value in line] for name, line in b.items()}


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """One run with both trackers, left alone; and the same without any."""
    config = resolve({**SETTINGS, "backbone": str(place / "tiny.safetensors")})
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
        patch.chdir(place)
        runs.run(config, out / "tracked", track=BOTH)
        runs.run(config, out / "plain")
    return out / "tracked"


class TestWhatIsSent:
    def test_no_result_changes(self, whole):
        timed = {"seconds", "task_seconds", "images_per_second", "peak_memory"}
        tracked, plain = metrics_of(whole), metrics_of(whole.parent / "plain")
        assert {k: v for k, v in tracked.items() if k not in timed} == {
            k: v for k, v in plain.items() if k not in timed
        }
        assert not {p.name for p in (whole.parent / "plain").iterdir()} & {"tensorboard", "mlflow_run_id.txt"}

    @pytest.mark.parametrize("points_of", [mlflow_points, tensorboard_points])
    def test_losses_of_every_step(self, whole, points_of):
        points, metrics = points_of(whole), metrics_of(whole)
        for term in ("task", "vq", "commitment"):
            line = points[f"loss/{term}"]
            assert [step for step, _ in line] == list(range(1, STEPS + 1))
            values, a_step = [value for _, value in line], STEPS // len(metrics["losses"])
            means = [mean(values[i : i + a_step]) for i in range(0, STEPS, a_step)]
            assert means == pytest.approx([entry["losses"][term] for entry in metrics["losses"]])
            assert len(set(values)) > STEPS / 2, "steps differ"

    @pytest.mark.parametrize("points_of", [mlflow_points, tensorboard_points])
    def test_accuracies(self, whole, points_of):
        points = {name: line for name, line in points_of(whole).items() if not name.startswith("loss/")}
        assert close(points, expected(metrics_of(whole)))

    def test_mlflow_has_config_report_and_status(self, whole, store):
        run = mlflow_run(whole)
        assert run.data.params == flatten(json.loads((whole / "config.json").read_text()))
        assert (run.info.status, run.info.run_name) == ("FINISHED", whole.as_posix())
        assert store.get_experiment(run.info.experiment_id).name == "vqprompt"
        assert {a.path for a in store.list_artifacts(run.info.run_id)} == {"config.json", "metrics.json", "report.html"}
        copy = Path(store.download_artifacts(run.info.run_id, "report.html"))
        assert copy.read_text() == (whole / "report.html").read_text()

    def test_tensorboard_has_config_and_where_the_report_is(self, whole):
        for name, value in flatten(json.loads((whole / "config.json").read_text())).items():
            assert f"|{name}|{value}|" in text(whole, "config")
        sent = hparams(whole)["session_start_info"].session_start_info.hparams
        assert sent["batch_size"].number_value == BATCH and sent["method"].string_value == "vq-prompt"
        assert "session_end_info" in hparams(whole)
        assert f"|FAA|{metrics_of(whole)['faa']:.2f}|" in text(whole, "report")
        assert str(whole / "report.html") in text(whole, "report")

    def test_an_experiment_of_one_s_own_and_very_long_settings(self, track, store, monkeypatch):
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "birds")
        monkeypatch.setattr("vqprompt.research.runs.tracking.flatten", lambda config: {"tasks": "x" * 9000})
        run = mlflow_run(track(trackers=["mlflow"], method="linear", tasks=[2]))
        assert store.get_experiment(run.info.experiment_id).name == "birds"
        assert run.data.params == {"tasks": "x" * 6000}

    def test_more_points_than_mlflow_takes_at_once(self, tmp_path):
        trackers = tracking.Tracking(["mlflow"], tmp_path)
        trackers.begin({})
        trackers.losses(7, {"task": [float(n) for n in range(1500)], "vq": [0.5] * 1500})
        assert mlflow_points(tmp_path)["loss/task"] == [(n + 8, float(n)) for n in range(1500)]


class TestResume:
    def assert_same(self, folder: Path, whole: Path) -> None:
        assert mlflow_points(folder) == mlflow_points(whole)
        assert tensorboard_points(folder) == tensorboard_points(whole)
        assert mlflow_run(folder).info.status == "FINISHED"
        assert text(folder, "config") == text(whole, "config"), "said once"

    @pytest.mark.parametrize(("what", "moment"), [("step", 2), ("step", 21), ("save", 2)])
    def test_killed_and_resumed_all_is_there_once(self, whole, track, tmp_path, monkeypatch, what, moment):
        """In the middle of epochs and tests, and before saving what trackers know already."""
        calls, save = 0, Learner.save

        def dying(*given, **named):
            nonlocal calls
            calls += 1
            if calls == moment:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(tracking.Tracking, "__exit__", lambda *error: None)  # the killed say no good-bye
            if what == "save":
                patch.setattr(Learner, "save", lambda *given, **named: (dying(), save(*given, **named)))
            with pytest.raises(Killed):
                track(progress=dying if what == "step" else ignore)
        begun = mlflow_run(tmp_path / "run")
        assert begun.info.status == "RUNNING" and "session_end_info" not in hparams(tmp_path / "run")
        folder = track(resume=True, device="cpu")  # a parameter that was "auto" before
        assert mlflow_run(folder).info.run_id == begun.info.run_id
        self.assert_same(folder, whole)
        self.assert_same(track(resume=True), whole)

    def test_tracking_may_begin_late(self, track):
        """Steps that were not tracked stay unknown; later ones have their true number."""

        def stop(event):
            if event.task == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            track(trackers=["mlflow"], progress=stop)
        folder = track(resume=True)
        assert [step for step, _ in mlflow_points(folder)["loss/task"]] == list(range(1, STEPS + 1))
        later = list(range(STEPS // TASKS + 1, STEPS + 1))
        assert [step for step, _ in tensorboard_points(folder)["loss/task"]] == later

    @pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (ZeroDivisionError, "FAILED")])
    def test_status_of_a_run_that_stops(self, track, tmp_path, error, status):
        def stop(event):
            if event.task == 1:
                raise error

        with pytest.raises(error):
            track(progress=stop, trackers=["mlflow"])
        assert mlflow_run(tmp_path / "run").info.status == status


class TestRefusals:
    @pytest.fixture(autouse=True)
    def no_work(self, monkeypatch):
        monkeypatch.setattr(runs, "open_dataset", lambda *given: pytest.fail("images are being read"))
        monkeypatch.setattr(runs, "Learner", lambda *given, **named: pytest.fail("a backbone is being read"))

    @pytest.fixture(params=[["run"], ["bench", "run", "cub200", "--small"]], ids=" ".join)
    def refused(self, request, command, tmp_path):
        def run(name: str) -> str:
            status, out, err = command(*request.param, "--out", tmp_path / "out", "--track", name)
            assert status == 2 and err.startswith(f"error: --track {name}: ") and "Traceback" not in out + err
            assert not (tmp_path / "out").exists(), "nothing is left behind"
            return err

        return run

    def test_unknown(self, refused):
        assert "there are mlflow and tensorboard" in refused("wandb")

    @pytest.mark.parametrize("name", BOTH)
    def test_not_installed(self, refused, monkeypatch, name):
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        monkeypatch.setitem(sys.modules, name, None)
        assert f'pip install "vqprompt[{name}]"' in refused(name)

    def test_no_such_store(self, refused, monkeypatch):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "gopher://birds")
        assert "gopher://birds" in refused("mlflow")

    def test_deleted_experiment(self, refused, store, tmp_path, monkeypatch):
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)
        store.delete_experiment(store.create_experiment(tmp_path.name))
        assert f"{tmp_path.name!r} was deleted; restore it" in refused("mlflow")

    def test_resumed_with_another_store(self, whole, command, tmp_path):
        folder = shutil.copytree(whole, tmp_path / "run")
        (folder / "mlflow_run_id.txt").write_text("1234")
        status, _, err = command("run", "--resume", "--out", folder, "--track", "mlflow")
        assert status == 2 and "the run 1234 is not in this store; set MLFLOW_TRACKING_URI" in err

    def test_help_teaches(self, command):
        for arguments in (["run"], ["bench", "run"]):
            out = command(*arguments, "--help")[1]
            for word in ("--track", "mlflow.db", "MLFLOW_TRACKING_URI", "tensorboard/"):
                assert word in out


class TestFailing:
    """For real: no table in the store, no room on the disk."""

    def break_mlflow(self, folder: Path) -> None:
        with sqlite3.connect(folder.parent / "mlflow.db") as database:
            database.execute("DROP TABLE metrics")

    def break_tensorboard(self, folder: Path) -> None:
        for file in (folder / "tensorboard").iterdir():
            file.unlink()
            file.symlink_to("/dev/full")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own
    @pytest.mark.parametrize("failing", BOTH)
    def test_nothing_learned_is_lost(self, whole, track, place, tmp_path, monkeypatch, failing):
        shutil.copy(place / "mlflow.db", tmp_path)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
        broken = False

        def breaking(event):
            nonlocal broken
            if event.task == 1 and not broken:
                broken = True
                getattr(self, f"break_{failing}")(tmp_path / "run")

        with pytest.warns(UserWarning, match=f"--track {failing} failed and is not used any more") as warned:
            folder = track(progress=breaking)
        assert len([w for w in warned if "--track" in str(w.message)]) == 1, "once"
        assert metrics_of(folder)["accuracy"] == metrics_of(whole)["accuracy"] and metrics_of(folder)["done"]
        if failing == "mlflow":
            assert tensorboard_points(folder) == tensorboard_points(whole), "the other goes on"
        else:
            assert mlflow_points(folder) == mlflow_points(whole), "the other goes on"


def test_bench(command, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(place / "mlflow.db", "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # MLflow's default store, beside the tables
    small = {"backbone": place / "tiny.safetensors", "epochs": 1, "tasks": "[2,2]", "train_per_class": 4}
    options = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    options += ["--track", "mlflow", "--track", "tensorboard", "--methods", "linear", "--seeds", "1,2"]
    status, out, err = command("bench", "run", "cub200", "--small", "--out", ".", *options)
    assert status == 0, err
    folders = sorted(path.parent for path in Path().rglob("tensorboard"))
    assert len(folders) == 2 and all(metrics_of(folder)["done"] for folder in folders)
    for folder in folders:
        assert tensorboard_points(folder)["faa"] == [(2, pytest.approx(metrics_of(folder)["faa"]))]
        assert mlflow_run(folder).info.run_name == folder.as_posix()
    status, out, err = command("bench", "run", "cub200", "--small", "--out", ".", *options)
    assert status == 0 and "2 of 2 runs are done already" in out
    row = next(line for line in Path("cub200-small.md").read_text().splitlines() if "Linear" in line)
    assert "| 1, 2 |" in row, "copies that MLflow keeps are no more runs"
