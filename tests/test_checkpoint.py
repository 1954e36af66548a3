"""Checkpoints: whole or not at all, refused when they are not ours, and never a pickle."""

import hashlib
import json
import os
import pickle
import re
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import Killed, make_learner, make_stream, make_vit, same_tensors, tensors_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import vqprompt
from vqprompt.core.data.images import Images
from vqprompt.core.errors import CheckpointError, UserError
from vqprompt.research.learner import checkpoint
from vqprompt.research.learner.checkpoint import read_checkpoint, write_checkpoint
from vqprompt.research.learner.learner import Learner
from vqprompt.research.learner.state import load_tensors

OLD, NEW = {"a": torch.arange(5.0), "b": torch.ones(2, 3)}, {"a": torch.zeros(7), "c": torch.tensor([True])}


@pytest.fixture(scope="module")
def learner():
    learner = make_learner("vq-prompt")
    for task in make_stream(tasks=2):
        learner.learn(task)
    return learner


def load(folder, vit=None) -> Learner:
    return Learner.load(folder, backbone=vit or make_vit(), compile="off")


def edit(folder, *without: str, **changes):
    """Change the JSON and sign it again, as if it had been written so."""
    info = json.loads((folder / "checkpoint.json").read_text()) | changes
    info = {key: value for key, value in info.items() if key not in without}
    (folder / "checkpoint.json").write_text(json.dumps({**info, "checksum": checkpoint.checksum(info)}))


def sha256(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class TestWriting:
    def test_round_trip(self, tmp_path):
        write_checkpoint(tmp_path / "deep" / "run", OLD, {"classes": ["ä", "b"]})
        tensors, info = read_checkpoint(tmp_path / "deep" / "run")
        assert same_tensors(tensors, OLD) and info["classes"] == ["ä", "b"]

    def test_tensors_lie_in_memory_as_torch_would_lay_them(self, tmp_path):
        """Where they lie in the file depends on the names; where a matrix lies, its products round by."""
        for length in range(1, 65, 8):
            write_checkpoint(tmp_path, {"x" * length + str(n): torch.rand(3, 5) for n in range(4)}, {})
            assert all(t.data_ptr() % 64 == 0 for t in read_checkpoint(tmp_path)[0].values())

    def test_the_newest_is_kept_alone(self, tmp_path):
        for i in range(12):
            write_checkpoint(tmp_path, {"i": torch.tensor(i)}, {"i": i})
        tensors, info = read_checkpoint(tmp_path)
        assert tensors["i"] == info["i"] == 11
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.json", "state-12.safetensors"]

    @pytest.mark.parametrize("step", ["half written", "replace 0", "fsync json", "replace 1", "unlink"])
    def test_killed_at_any_step_leaves_a_whole_one(self, tmp_path, monkeypatch, step):
        write_checkpoint(tmp_path, OLD, {"which": "old"})
        name, _, number = step.partition(" ")
        calls = []

        def die(plain):
            def dying(*given, **named):
                calls.append(given)
                if len(calls) - 1 == {"json": 1}.get(number, int(number) if number.isdigit() else 0):
                    raise Killed
                return plain(*given, **named)

            return dying

        with monkeypatch.context() as patch:
            if name == "half":

                def half_written(path, data):
                    path.write_bytes(b"\x00" * 50)
                    raise Killed

                patch.setattr(checkpoint, "write_atomically", half_written)
            elif name == "unlink":  # of the old state

                def dying(path, missing_ok=False, plain=checkpoint.Path.unlink):
                    if path.name == "state-1.safetensors":
                        raise Killed
                    plain(path, missing_ok=missing_ok)

                patch.setattr(checkpoint.Path, "unlink", dying)
            else:
                patch.setattr(os, name, die(getattr(os, name)))
            with pytest.raises(Killed):
                write_checkpoint(tmp_path, NEW, {"which": "new"})
        tensors, info = read_checkpoint(tmp_path)
        whole = {"old": OLD, "new": NEW}[info["which"]]
        assert same_tensors(tensors, whole)
        assert info["which"] == ("new" if step == "unlink" else "old")
        write_checkpoint(tmp_path, NEW, {"which": "newer"})
        assert read_checkpoint(tmp_path)[1]["which"] == "newer"
        assert not list(tmp_path.glob(".state-*")), "what the killed one left is cleared away"


class TestChecksum:
    """Everything that a checkpoint says is covered."""

    @pytest.mark.parametrize("key", ["which", "bytes", "tensors", "sha256", "version"])
    def test_a_change_of_any_value_is_noticed(self, tmp_path, key):
        write_checkpoint(tmp_path, OLD, {"which": "old"})
        info = json.loads((tmp_path / "checkpoint.json").read_text())
        info[key] = info[key] + 1 if isinstance(info[key], int) else info[key] + "x"
        (tmp_path / "checkpoint.json").write_text(json.dumps(info))
        with pytest.raises(CheckpointError, match=r"checkpoint\.json: damaged|checkpoint version"):
            read_checkpoint(tmp_path)

    def test_spaces_and_order_do_not_matter(self, tmp_path):
        write_checkpoint(tmp_path, OLD, {"which": "old", "nested": {"b": 1.5, "a": [None, True]}})
        info = json.loads((tmp_path / "checkpoint.json").read_text())
        (tmp_path / "checkpoint.json").write_text(json.dumps(dict(reversed(info.items())), separators=(",", ":")))
        assert read_checkpoint(tmp_path)[1]["nested"] == {"b": 1.5, "a": [None, True]}

    def test_one_without_it_is_refused(self, tmp_path):
        write_checkpoint(tmp_path, OLD, {"which": "old"})
        info = json.loads((tmp_path / "checkpoint.json").read_text())
        del info["checksum"]
        (tmp_path / "checkpoint.json").write_text(json.dumps(info))
        with pytest.raises(CheckpointError, match="damaged"):
            read_checkpoint(tmp_path)

    @given(st.data())
    def test_no_change_of_the_text_changes_what_is_read(self, data):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_checkpoint(folder, {"a": torch.arange(3.0)}, {"classes": ["ä", "b"], "tau": 1.5, "history": [[1, 2]]})
            text = (folder / "checkpoint.json").read_bytes()
            at = data.draw(st.integers(0, len(text) - 1))
            length, new = data.draw(st.integers(0, 4)), data.draw(st.binary(max_size=4))
            before = read_checkpoint(folder)[1]
            (folder / "checkpoint.json").write_bytes(text[:at] + new + text[at + length :])
            try:
                assert read_checkpoint(folder)[1] == before
            except CheckpointError as error:
                assert str(folder) in str(error)


class TestLeftBehind:
    def test_a_kill_before_the_old_tensors_are_deleted(self, tmp_path):
        for i in range(2):
            write_checkpoint(tmp_path, {"i": torch.tensor(i)}, {})
        (tmp_path / "state-1.safetensors").write_bytes(b"old")
        (tmp_path / ".saving").touch()
        checkpoint.tidy(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.json", "state-2.safetensors"]


class TestRefusals:
    @pytest.fixture
    def folder(self, tmp_path):
        write_checkpoint(tmp_path, OLD, {"which": "old"})
        return tmp_path

    def refused(self, folder, match):
        with pytest.raises(CheckpointError, match=match) as caught:
            read_checkpoint(folder)
        assert str(folder) in str(caught.value)

    def test_an_empty_or_missing_folder(self, tmp_path):
        self.refused(tmp_path, "no checkpoint.json here; give a folder that")
        self.refused(tmp_path / "missing", "no checkpoint.json here")

    @pytest.mark.parametrize("keep", [0, 1, 30, -1])
    def test_half_written_tensors(self, folder, keep):
        (state,) = folder.glob("state-*")
        state.write_bytes(state.read_bytes()[:keep])
        self.refused(folder, "damaged or half-written")

    def test_one_flipped_bit(self, folder):
        (state,) = folder.glob("state-*")
        data = bytearray(state.read_bytes())
        data[-1] ^= 1
        state.write_bytes(data)
        self.refused(folder, "damaged or half-written")

    def test_tensors_gone(self, folder):
        next(folder.glob("state-*")).unlink()
        self.refused(folder, "tensors are missing; restore the file or start over")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            *((text, "not a checkpoint, or damaged") for text in (b"", b'{"format": "vqprompt-check', b"\x80\x04\xff")),
            *((text, "not a vqprompt checkpoint") for text in (b"[]", b"null", b'{"format": "other", "version": 1}')),
        ],
    )
    def test_half_written_or_foreign_json(self, folder, text, words):
        (folder / "checkpoint.json").write_bytes(text)
        self.refused(folder, words)

    @pytest.mark.parametrize("version", [0, 1, 3, "2"])
    def test_another_version(self, folder, version):
        edit(folder, version=version)
        self.refused(folder, f"checkpoint version {version}, and this vqprompt reads version 2")

    def test_tensors_that_are_not_safetensors(self, folder):
        state = folder / "state-1.safetensors"
        state.write_bytes(b"GIF89a, or anything else" * 10)
        edit(folder, bytes=state.stat().st_size, sha256=sha256(state))
        self.refused(folder, "not a safetensors file")

    def test_tensors_are_only_looked_for_inside(self, folder, tmp_path_factory):
        outside = tmp_path_factory.mktemp("outside") / "state-1.safetensors"
        save_file(NEW, outside)
        next(folder.glob("state-*")).unlink()
        edit(folder, tensors=str(outside), bytes=outside.stat().st_size, sha256=sha256(outside))
        self.refused(folder, "tensors are missing")


class TestLoadTensors:
    def test_missing_and_extra_names_are_refused(self):
        module = torch.nn.Linear(2, 2)
        names, state = set(module.state_dict()), dict(module.state_dict())
        with pytest.raises(CheckpointError, match=r"here: .*missing \['bias'\], unexpected \[\]"):
            load_tensors(module, {"weight": state["weight"]}, names, "here")
        with pytest.raises(CheckpointError, match=r"missing \[\], unexpected \['more'\]"):
            load_tensors(module, state | {"more": torch.zeros(1)}, names, "here")

    def test_parameters_stay_parameters_and_only_statistics_change_their_shape(self):
        module = torch.nn.BatchNorm1d(2)
        module.bias.requires_grad_(False)
        state = dict(module.state_dict()) | {"running_mean": torch.ones(5)}
        load_tensors(module, state, set(state), "here")
        assert isinstance(module.weight, torch.nn.Parameter) and module.running_mean.shape == (5,)
        assert module.weight.requires_grad and not module.bias.requires_grad
        with pytest.raises(CheckpointError, match=r"here: weight has the shape \(5,\)"):
            load_tensors(module, state | {"weight": torch.ones(5)}, set(state), "here")


@pytest.mark.bits
class TestLearner:
    @pytest.mark.parametrize(
        ("key", "value"),
        [("training", 3), ("training", {"batch_size": 5.1}), ("options", []), ("classes", "ab"), ("size", 10**9),
         ("planned_tasks", 10**9), ("tasks", [[0, 0, "2"]]), ("unfinished", {"task": [2, 6, 10**9]}), ("seed", None)],
    )  # fmt: skip
    def test_a_forged_value_is_refused_in_words(self, learner, tmp_path, key, value):
        learner.save(tmp_path)
        info = json.loads((tmp_path / "checkpoint.json").read_text()) | {key: value}
        (tmp_path / "checkpoint.json").write_text(json.dumps(info | {"checksum": checkpoint.checksum(info)}))
        with pytest.raises(CheckpointError, match=key):
            load(tmp_path)

    def test_more_classes_than_the_classifier_has(self, learner, tmp_path):
        learner.save(tmp_path)
        info = json.loads((tmp_path / "checkpoint.json").read_text())
        info["classes"], info["tasks"] = info["classes"][:-1], [[0, 0, 3], [1, 3, 2]]
        (tmp_path / "checkpoint.json").write_text(json.dumps(info | {"checksum": checkpoint.checksum(info)}))
        with pytest.raises(CheckpointError, match=r"shape \(6.*\), but classes and options want \(5"):
            load(tmp_path)

    def test_round_trip(self, learner, tmp_path):
        learner.save(tmp_path, run={"note": "mine"})
        again = load(tmp_path)
        assert same_tensors(tensors_of(learner), tensors_of(again))
        assert again.classes == learner.classes and again.history == learner.history
        assert again.settings == learner.settings and again.method.options == learner.method.options
        test = Images.concatenate([task.test for task in make_stream(tasks=2).tasks])
        assert torch.equal(learner.logits(test), again.logits(test))
        assert read_checkpoint(tmp_path)[1]["run"] == {"note": "mine"}

    def test_a_frozen_backbone_is_named_not_copied(self, learner, tmp_path):
        learner.save(tmp_path)
        tensors, _ = read_checkpoint(tmp_path)
        assert not [name for name in tensors if ".vit." in name]
        tuned = make_learner("ft")
        tuned.learn(next(iter(make_stream())))
        tuned.save(tmp_path / "ft")
        assert [name for name in read_checkpoint(tmp_path / "ft")[0] if name.startswith("method.vit.")]
        assert same_tensors(tensors_of(tuned), tensors_of(load(tmp_path / "ft")))

    def test_another_backbone_is_refused(self, learner, tmp_path):
        learner.save(tmp_path)
        with pytest.raises(CheckpointError, match="learned with other weights"):
            load(tmp_path, make_vit(seed=1))
        moved = make_vit()
        with torch.no_grad():
            moved.blocks[3].mlp.fc2.bias[0] += 1e-6
        with pytest.raises(CheckpointError, match="learned with other weights"):
            load(tmp_path, moved)

    @pytest.mark.parametrize("change", ["missing", "extra"])
    def test_tensors_that_do_not_fit_the_method_are_refused(self, learner, tmp_path, change):
        learner.save(tmp_path)
        tensors, info = read_checkpoint(tmp_path)
        if change == "missing":
            del tensors["method.pool.keys"]
        else:
            tensors["method.pool.locks"] = torch.zeros(3)
        mine = {k: v for k, v in info.items() if k not in ("format", "version", "tensors", "bytes", "sha256")}
        write_checkpoint(tmp_path, tensors, mine)
        with pytest.raises(CheckpointError, match=r"does not fit this method: .*pool\.(keys|locks)"):
            load(tmp_path)

    @pytest.mark.parametrize("key", ["backbone", "method", "options", "classes", "tasks", "training", "unfinished"])
    def test_a_key_taken_out_is_refused(self, learner, tmp_path, key):
        learner.save(tmp_path)
        edit(tmp_path, key)
        with pytest.raises(CheckpointError, match=f"restore it or start over: {key}: Field required"):
            load(tmp_path)

    def test_another_method_s_checkpoint_is_refused(self, learner, tmp_path):
        learner.save(tmp_path)
        edit(tmp_path, method="linear", options={})
        with pytest.raises(CheckpointError, match="does not fit this method"):
            load(tmp_path)
        edit(tmp_path, method="no such method")
        with pytest.raises(UserError, match="unknown method"):
            load(tmp_path)

    def test_no_pickle(self, learner, tmp_path, monkeypatch):
        def forbidden(*given, **named):
            raise AssertionError("pickle was used")

        for name in ("dumps", "dump", "loads", "load", "Pickler", "Unpickler"):
            monkeypatch.setattr(pickle, name, forbidden)
        monkeypatch.setattr(torch, "save", forbidden)
        monkeypatch.setattr(torch, "load", forbidden)
        learner.save(tmp_path)
        load(tmp_path)
        assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}

    def test_no_module_reads_pickles_unguarded(self):
        """torch.load only with weights_only, numpy never with allow_pickle."""
        for path in Path(vqprompt.__file__).parent.rglob("*.py"):
            text = path.read_text()
            unguarded = re.search(r"allow_pickle\s*=\s*True|pickle\.loads?\(|torch\.save\(", text)
            assert not unguarded, path
            assert all("weights_only=True" in call for call in re.findall(r"torch\.load\([^\n]*", text)), path
