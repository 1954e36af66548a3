"""Predictors: what was learned at one moment, whatever the learner does next and whoever asks at the same time."""

import threading

import numpy as np
import pytest
import torch
from conftest import make_learner, make_stream, make_vit, same_tensors, tensors_of

from vqprompt import Predictor

pytestmark = pytest.mark.bits
METHODS = ["hide-prompt", "bic"]  # a frozen backbone with two classifiers; a tuned one, and images that are kept


@pytest.fixture
def pictures():
    return list(np.random.default_rng(1).integers(0, 256, (5, 24, 40, 3), np.uint8))


def small(method: str) -> dict:
    return {"rebalancing": {"epochs": 1}, "identity_rebalancing": {"epochs": 1}} if method == "hide-prompt" else {}


@pytest.mark.parametrize("method", METHODS)
def test_it_says_what_its_learner_says_and_stays_as_it_was(method, pictures):
    learner, tasks = make_learner(method, **small(method)), iter(make_stream())
    learner.learn(next(tasks))
    predictor, then = learner.predictor(), learner.predict_proba(pictures)
    assert torch.equal(predictor.predict_proba(pictures), then)
    assert predictor.predict(pictures) == learner.predict(pictures)
    learner.learn(next(tasks))
    assert not torch.equal(learner.predict_proba(pictures)[:, :2], then), "the learner has gone on"
    assert torch.equal(predictor.predict_proba(pictures), then)
    assert predictor.classes == tuple(learner.classes[:2])


def test_it_holds_no_more_than_predictions_need():
    learner, tasks = make_learner("bic"), iter(make_stream())
    for _ in range(2):
        learner.learn(next(tasks))
    copied = learner.predictor()._evaluator.method
    assert not any(t.dtype == torch.uint8 for t in copied.state_dict().values()), "no images"
    frozen = make_learner("vq-prompt")
    frozen.learn(next(iter(make_stream())))
    copied = frozen.predictor()._evaluator.method
    assert copied.vit is frozen.vit and copied.statistics is None, "a frozen backbone is shared"


@pytest.mark.parametrize("method", METHODS)
def test_from_four_threads_while_the_learner_learns(method, pictures):
    """The same bits as alone, for the threads and for the learner."""
    alone = make_learner(method, **small(method))
    for task in make_stream():
        alone.learn(task)
    learner, tasks = make_learner(method, **small(method)), iter(make_stream())
    learner.learn(next(tasks))
    predictor = learner.predictor()
    expected, found, failed, over = predictor.predict_proba(pictures), [], [], threading.Event()

    def ask():
        try:
            while True:
                found.append(torch.equal(predictor.predict_proba(pictures), expected))
                if over.is_set():
                    break
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for task in tasks:
            learner.learn(task)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failed and len(found) >= 4 and all(found)
    assert same_tensors(tensors_of(learner), tensors_of(alone))


def test_loading_in_another_thread_does_not_disturb_the_learner(tmp_path, pictures):
    """What a new task begins with is drawn from one random state, which loading uses, too."""
    alone, saved = make_learner("coda-p"), make_learner("coda-p")
    for task in make_stream():
        alone.learn(task)
    saved.learn(next(iter(make_stream())))
    saved.save(tmp_path)
    over, loaded, vit = threading.Event(), [], make_vit()  # made here: a new network draws without a seed

    def load():
        while not over.is_set() or not loaded:
            loaded.append(Predictor.load(tmp_path, device="cpu", compile="off", backbone=vit))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        learner = make_learner("coda-p")
        for task in make_stream():
            learner.learn(task)
    finally:
        over.set()
        thread.join()
    assert loaded and same_tensors(tensors_of(learner), tensors_of(alone))


@pytest.mark.parametrize("method", ["vq-prompt", "lwf"])
def test_from_a_checkpoint_in_mid_task(method, tmp_path, pictures):
    learner, tasks = make_learner(method), iter(make_stream())
    learner.learn(next(tasks))
    next(learner.epochs(next(tasks)))
    expected = learner.predictor().predict_proba(pictures)
    learner.save(tmp_path)
    predictor = Predictor.load(tmp_path, device="cpu", compile="off", backbone=make_vit())
    assert len(predictor.classes) == 2, "the classes that are half learned do not count"
    assert torch.equal(predictor.predict_proba(pictures), expected)
    assert torch.equal(predictor.predict_proba(pictures[0]), predictor.predict_proba(pictures[:1])), "one alone, too"
    assert not [name for name in predictor._evaluator.method.state_dict() if name.startswith("former")]


def test_loading_leaves_the_caller_s_randomness_alone(tmp_path):
    learner = make_learner()
    learner.learn(next(iter(make_stream())))
    learner.save(tmp_path)
    vit = make_vit()
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    Predictor.load(tmp_path, device="cpu", compile="off", backbone=vit)
    assert torch.equal(torch.rand(3), expected)
