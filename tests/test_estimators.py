"""scikit-learn: its own checks, its own discriminant as the judge, its model selection."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from drawings import write_drawings
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from vqprompt import ClosedFormClassifier, Model, VQPromptClassifier
from vqprompt.core.onnx.graph import Session
from vqprompt.product.estimators import images as on_images

NAMES = ["apple", "bicycle", "cactus", "car"]
TINY = {"size": 28, "device": "cpu"}
EXPECTED_FAILURES: dict[str, str] = {}  # none: every check passes


# ---------------------------------------------------------------------------------------------- feature matrices


@parametrize_with_checks(
    [ClosedFormClassifier(), ClosedFormClassifier(shrinkage=0.1)],
    expected_failed_checks=lambda estimator: EXPECTED_FAILURES,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("data", [load_digits, load_iris])
@pytest.mark.parametrize("shrinkage", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_equals_the_linear_discriminant(data, shrinkage):
    X, y = data(return_X_y=True)
    X, y = X[15:], y[15:]  # classes of unequal size
    judge = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(X, y)
    ours = ClosedFormClassifier(shrinkage).fit(X, y)
    assert np.array_equal(judge.predict(X), ours.predict(X))
    np.testing.assert_allclose(judge.predict_proba(X), ours.predict_proba(X), atol=1e-10)
    np.testing.assert_allclose(judge.means_, ours.means_, atol=1e-10)


def test_two_classes_have_one_score_as_in_scikit_learn():
    X, y = load_iris(return_X_y=True)
    X, y = X[y > 0], y[y > 0]
    judge = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(X, y)
    np.testing.assert_allclose(
        judge.decision_function(X), ClosedFormClassifier(0.1).fit(X, y).decision_function(X), atol=1e-9
    )


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_any_order_and_number_of_parts_gives_the_same_classifier(seed, parts):
    rng = np.random.default_rng(seed)
    X, y = load_iris(return_X_y=True)
    X = X + 1e4  # large features that spread little
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    once = ClosedFormClassifier().fit(X, names)
    order = rng.permutation(len(X))
    more = ClosedFormClassifier()
    for part in np.array_split(order, parts):
        more.partial_fit(X[part], names[part])
    assert more.classes_.tolist() == once.classes_.tolist()
    assert more.shrinkage_ == pytest.approx(once.shrinkage_, rel=1e-6)
    np.testing.assert_allclose(more.predict_proba(X), once.predict_proba(X), atol=1e-6)


def test_announced_classes_are_not_predicted_before_they_come():
    X, y = load_iris(return_X_y=True)
    ours = ClosedFormClassifier().partial_fit(X[y < 2], y[y < 2], classes=[0, 1, 2])
    assert ours.classes_.tolist() == [0, 1, 2]
    assert (ours.predict_proba(X)[:, 2] == 0).all() and set(ours.predict(X)) <= {0, 1}


def test_one_row_per_class_is_the_nearest_mean():
    ours = ClosedFormClassifier().fit([[0.0, 0.0], [10.0, 0.0]], ["left", "right"])
    assert ours.predict([[1.0, 3.0], [9.0, -3.0]]).tolist() == ["left", "right"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shrinkage": 1.5}, "from 0 to 1"),
        ({"shrinkage": "much"}, "or 'auto'"),
    ],
)
def test_bad_settings_are_refused_in_words(settings, words):
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match=words):
        ClosedFormClassifier(**settings).fit(X, y)


@pytest.mark.parametrize("y", [[None, None], ["a", None]])
def test_labels_that_are_none_are_named(y):
    rows, images = np.eye(2), np.zeros((2, 8, 8, 3), np.uint8)
    ours = ClosedFormClassifier()
    for learn, X in ((ours.fit, rows), (ours.partial_fit, rows), (VQPromptClassifier(size=28).fit, images)):
        with pytest.raises(ValueError, match="y: classes are names or whole numbers, not None"):
            learn(X, y)


def test_names_after_numbers_are_refused():
    X, y = load_iris(return_X_y=True)
    ours = ClosedFormClassifier().fit(X, y)
    with pytest.raises(ValueError, match="not both"):
        ours.partial_fit(X[:1], ["setosa"])
    image = np.zeros((1, 8, 8, 3), np.uint8)
    for first, then in (([1], ["a"]), (["a"], [1]), (np.array(["a"], object), [1])):
        with pytest.raises(ValueError, match="not both"):
            VQPromptClassifier(size=28).fit(image, first).partial_fit(image, then)


def test_oas_comes_close_to_the_best_shrinkage():
    X, y = load_digits(return_X_y=True)
    X, y = X[:200] + np.random.default_rng(0).normal(size=(200, 64)), y[:200]
    found = cross_val_score(ClosedFormClassifier(), X, y).mean()
    best = max(cross_val_score(ClosedFormClassifier(s), X, y).mean() for s in (0.01, 0.05, 0.1, 0.2, 0.5, 0.9))
    assert found >= best - 0.02


# ---------------------------------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = write_drawings(tmp_path_factory.mktemp("drawings"), NAMES, range(12))
    paths = sorted(folder.rglob("*.png"))
    return [str(p) for p in paths], np.array([p.parent.name for p in paths])


def test_paths_images_and_arrays_are_the_same_to_it(files):
    paths, labels = files
    opened = [Image.open(p).convert("RGB") for p in paths]
    arrays = np.stack([np.asarray(image) for image in opened])
    first, *others = (VQPromptClassifier(**TINY).fit(X, labels) for X in (paths, opened, arrays))
    assert first.predict_proba(paths).shape == (len(paths), 4)
    for other, X in zip(others, (opened, arrays), strict=True):
        assert np.array_equal(first.transform(paths), other.transform(X))
        one, two = (classifier.model_.knowledge for classifier in (first, other))
        assert np.array_equal(one.solution.discriminant.weights, two.solution.discriminant.weights)
        assert np.array_equal(one.solution.discriminant.bias, two.solution.discriminant.bias)
        # images are kept in another order, so sums round in another way; 20 rounds of golden section find the logarithm
        # of the temperature to 7e-4
        temperatures = [known.solution.calibration.temperature for known in (one, two)]
        assert np.log(temperatures[0]) == pytest.approx(np.log(temperatures[1]), abs=7e-4)
        same = replace(two.solution, calibration=one.solution.calibration)
        np.testing.assert_allclose(first.predict_proba(paths), same.judge(other.transform(X))[0], atol=1e-5)


def test_it_is_the_living_model(files, tmp_path):
    paths, labels = files
    ours = VQPromptClassifier(**TINY).fit(paths, labels)
    model = Model(**TINY)
    model.learn(paths, list(labels))
    np.testing.assert_array_equal(ours.predict_proba(paths), model.predict_proba(paths))
    assert ours.classes_.tolist() == list(model.classes)
    again = Model.load(ours.model_.save(tmp_path / "drawings.vqp"), device="cpu")
    assert again.predict(paths[0], unknown=False) == ours.predict(paths[:1])[0]


def test_partial_fit_welcomes_new_classes(files):
    paths, labels = files
    first = np.isin(labels, NAMES[:2])
    ours = VQPromptClassifier(**TINY)
    for chosen in (first, ~first):
        ours.partial_fit([p for p, c in zip(paths, chosen, strict=True) if c], labels[chosen])
    assert ours.classes_.tolist() == sorted(NAMES)
    once = VQPromptClassifier(**TINY).fit(paths, labels)
    np.testing.assert_allclose(ours.predict_proba(paths), once.predict_proba(paths), atol=1e-6)
    assert ours.score(paths, labels) == once.score(paths, labels) > 0.5


def test_numbers_as_labels_keep_their_order(files):
    paths, labels = files
    numbers = np.array([{"apple": 2, "bicycle": 10, "cactus": 1, "car": 33}[name] for name in labels])
    ours = VQPromptClassifier(**TINY).fit(paths, numbers)
    assert ours.classes_.tolist() == [1, 2, 10, 33]
    assert ours.predict(paths).dtype.kind == "i" and ours.score(paths, numbers) > 0.5


def test_pickle_clone_and_settings(files):
    paths, labels = files
    ours = VQPromptClassifier(**TINY).fit(paths, labels)
    again = pickle.loads(pickle.dumps(ours))
    np.testing.assert_array_equal(again.predict_proba(paths), ours.predict_proba(paths))
    again.partial_fit([np.zeros((28, 28), np.uint8)], ["black"])
    assert "black" in again.classes_ and "black" not in ours.classes_
    fresh = clone(ours)
    assert fresh.get_params() == ours.get_params() and not hasattr(fresh, "model_")
    assert fresh.set_params(size=42).size == 42


def test_model_selection_shows_each_image_to_the_network_once(files, monkeypatch):
    paths, labels = files
    on_images.open_remembering.cache_clear()
    seen = 0
    run = Session.run

    def counted(self, **inputs):
        nonlocal seen
        seen += len(inputs["pixels"])
        return run(self, **inputs)

    monkeypatch.setattr(Session, "run", counted)
    assert cross_val_score(VQPromptClassifier(**TINY), paths, labels, cv=3, error_score="raise").shape == (3,)
    assert seen == len(paths)


def test_grid_search_in_a_pipeline(files):
    paths, labels = files
    opening = FunctionTransformer(lambda X: [Image.open(p) for p in X])
    search = GridSearchCV(
        make_pipeline(opening, VQPromptClassifier(**TINY)), {"vqpromptclassifier__crop": [0.0, 0.875]}, cv=2,
        error_score="raise",
    )  # fmt: skip
    search.fit(paths, labels)
    assert search.best_params_["vqpromptclassifier__crop"] in (0.0, 0.875)
    assert search.predict(paths[:2]).shape == (2,)


def test_unknown_can_be_an_answer(files):
    paths, labels = files
    ours = VQPromptClassifier(**TINY, unknown="unknown").fit(paths, labels)
    noise = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 3), dtype=np.uint8)
    assert set(ours.predict(noise)) == {"unknown"}
    assert set(ours.set_params(unknown=None).predict(noise)) <= set(NAMES)


@pytest.mark.parametrize(
    ("X", "y", "words"),
    [
        ("photo.jpg", ["cat"], "list"),
        ([], [], "no image"),
        ([np.zeros((8, 8), np.uint8)], ["a", "b"], "one label per image"),
        ([np.zeros((8, 8), np.uint8)], [0.5], "fractions"),
        ([np.zeros((8, 8), np.uint8), np.ones((8, 8), np.uint8)], [None, None], "names or whole numbers, not None"),
        ([np.zeros((8, 8), np.float32)], ["a"], "uint8"),
        (["nowhere.png"], ["a"], "nowhere.png"),
    ],
)
def test_bad_images_are_refused_in_words(X, y, words):
    with pytest.raises(ValueError, match=words):
        VQPromptClassifier(**TINY).fit(X, y)
