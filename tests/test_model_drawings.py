"""What is promised of the model on real drawings: percentages, the unknown, shrinkage, several kinds in one class."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from drawings import drawings

from vqprompt import Model
from vqprompt.core.statistics.discriminant import Basis, Groups, Means
from vqprompt.core.statistics.leave_one_out import LeaveOneOut
from vqprompt.product.model.calibration import calibration_error_of, solve
from vqprompt.product.model.closed_form import SHRINKAGES, Trials, choose_shrinkage, groups_of
from vqprompt.product.model.records import ClassRecord, gram_of, to_fixed_point

SIZE = 42
CLASSES = 16
HALF = CLASSES // 2


@pytest.fixture(scope="module")
def features() -> tuple[np.ndarray, np.ndarray]:
    """Of some classes: 20 drawings to learn and 20 to test [CLASSES, 20, D] each."""
    from vqprompt.core.backbones.load import load_backbone
    from vqprompt.product.model.features import Features

    images, _ = drawings()
    extractor = Features(load_backbone("vit-s14", SIZE), 0.875)
    chosen = images[:CLASSES, [*range(20), *range(80, 100)]].reshape(-1, 1, 28, 28).repeat(3, axis=1)
    found = [extractor._forward(part, [1.0] * len(part)) for part in np.split(chosen, CLASSES)]
    every = np.concatenate(found).reshape(CLASSES, 40, -1)
    return every[:, :20], every[:, 20:]


def records_of(features: np.ndarray) -> list[ClassRecord]:
    names = np.random.default_rng(0).permutation(features.shape[0] * features.shape[1]).astype(np.uint64)
    return [
        ClassRecord.of(n, to_fixed_point(f)) for n, f in zip(names.reshape(features.shape[:2]), features, strict=True)
    ]


def left_out(groups: Groups, basis: Basis, trials: Trials) -> LeaveOneOut:
    return LeaveOneOut(groups, basis, trials.features, trials.groups)


def model_of(records: dict[str, ClassRecord]) -> Model:
    """A model around records, without a backbone."""
    from vqprompt.product.model.knowledge import Backbone, Stored

    width = len(next(iter(records.values())).total)
    model = Model._of(Stored.empty(Backbone("none", "", SIZE, 0.875, width)), "cpu", None)
    model.learn_records(records)
    return model


def test_percentages_are_believable(features):
    learned, tested = features
    model = model_of({f"{i:02}": r for i, r in enumerate(records_of(learned))})
    shares, _ = model.judge(tested.reshape(-1, tested.shape[2]))
    classes = np.arange(CLASSES).repeat(20)
    error = calibration_error_of(shares, classes)
    scores = model.knowledge.solution.discriminant.scores(tested.reshape(-1, tested.shape[2]))
    raw = calibration_error_of(_softmax(scores), classes)
    assert error < 0.07 < raw  # 320 images: the estimate itself is off by about 2 %
    right = (shares.argmax(1) == classes).mean()
    assert right > 0.6
    assert model.accuracy == pytest.approx(right, abs=0.06)  # what leaving one out said beforehand


def _softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_the_unknown_is_recognized(features):
    from sklearn.metrics import roc_auc_score

    learned, tested = features
    model = model_of({f"{i:02}": r for i, r in enumerate(records_of(learned)) if i < HALF})
    shares, known = model.judge(tested[:HALF].reshape(20 * HALF, -1))
    others, strange = model.judge(tested[HALF:].reshape(20 * HALF, -1))
    accepted = (known >= 0).mean()
    assert 0.88 <= accepted <= 1.0
    truth = np.r_[np.ones(len(known)), np.zeros(len(strange))]
    auroc = roc_auc_score(truth, np.r_[known, strange])
    assert auroc > roc_auc_score(truth, np.r_[shares.max(1), others.max(1)]) - 0.01
    noise = np.random.default_rng(0).normal(size=(50, learned.shape[2])) * 3
    assert (model.judge(noise)[1] < 0).mean() > 0.9


def test_estimated_shrinkage_is_within_half_a_point_of_the_best(features):
    learned, tested = features
    flat, classes = tested.reshape(-1, tested.shape[2]), np.arange(CLASSES).repeat(20)
    for count in (20, 8):
        records = records_of(learned[:, :count])
        groups = groups_of(records, sum(gram_of(r) for r in records))
        basis = Basis.of(groups)
        accuracy = {}
        for s in SHRINKAGES:
            means = left_out(groups, basis, Trials.of(records, range(CLASSES))).at(s).means
            accuracy[s] = (basis.discriminant(means, s, groups.owners).scores(flat).argmax(1) == classes).mean()
        chosen = choose_shrinkage(records, groups, basis)
        assert accuracy[chosen] >= max(accuracy.values()) - 0.0176  # half a point, and what 320 images leave open


@pytest.mark.parametrize("kinds", [1, 2])
def test_leaving_one_out_equals_solving_again_without_it(features, kinds):
    learned, _ = features
    x, labels = learned[:6, :8].reshape(48, -1).astype(np.float64), np.arange(6).repeat(8)
    x[:24] += (kinds - 1) * learned[10].mean(0)
    kept = np.r_[0:3, 8:48]  # one class is smaller than the others
    x, labels = x[kept], labels[kept]
    groups = Groups.of(x, labels, 6)
    basis = Basis.of(groups)
    trials = LeaveOneOut(groups, basis, x, labels)
    without, stretch = trials.at(0.3), trials.stretch(0.3)
    diagonal, line = np.diag(1 / (basis.vectors**2).sum(1)), without.means.line
    assert line.any() == (kinds == 2)
    others, kept = x[:5] - 1, np.linspace(0.1, 0.9, 5)  # means of something else, moved as those of the classes
    around, at_center = trials.around(0.3, without.means, others @ basis.vectors, kept)
    to_line, line_itself = basis.vectors @ line[1], np.linalg.solve(basis.vectors.T, line[0])

    def moved(points: np.ndarray, kept: np.ndarray, center: np.ndarray) -> np.ndarray:
        along = np.outer((points - center) @ to_line, line_itself)
        return center + kept[:, None] * (points - center - along) + along

    for i in (0, 17, 40):
        again = Groups.of(np.delete(x, i, 0), np.delete(labels, i), 6)
        # the diagonal that it is shrunk to, and how far means are, stay those of all images
        covariance = 0.7 * again.covariance() + 0.3 * diagonal * basis.freedom / (basis.freedom - 1)
        inverse, center = np.linalg.inv(covariance), again.means.mean(0)
        reliance = again.counts * without.means.ratio / (again.counts * without.means.ratio + 1)
        means = moved(again.means, reliance, center)
        wanted = means @ inverse @ x[i] - 0.5 * ((means @ inverse) * means).sum(1) + without.means.bonus(again.counts)
        assert np.allclose(without.scores[i], wanted, atol=1e-5 * np.abs(wanted).max())
        middle = groups.means.mean(0)
        compared = np.vstack([middle, moved(others, kept, middle)])
        wanted = compared @ inverse @ x[i] - 0.5 * ((compared @ inverse) * compared).sum(1)
        assert np.allclose(around[i] + at_center[i], wanted[1:], atol=1e-5 * np.abs(wanted).max())
        assert at_center[i] == pytest.approx(wanted[0])
        assert without.norms[i] == pytest.approx(x[i] @ inverse @ x[i])
        assert without.from_center[i] == pytest.approx((x[i] - center) @ inverse @ (x[i] - center))
        # with a diagonal that is computed again, too, distances are larger; the stretch makes up for most of it
        offset = x[i] - center
        new = Basis.of(again)
        exact = ((offset @ new.vectors) ** 2 / new.shrunk(0.3)).sum()
        assert exact > without.from_center[i]
        assert without.from_center[i] * stretch[i] == pytest.approx(exact, rel=0.05)


def test_several_kinds_in_one_class_are_found_and_help(features):
    learned, tested = features
    # kinds that have nothing in common: two classes under one name, one of them in another style
    style = 3.0 * np.sign(np.random.default_rng(1).normal(size=learned.shape[2]))
    apart = np.concatenate([learned[:HALF], learned[HALF:] + style], axis=1)
    records = records_of(apart)
    assert all(r.modes.max() == 1 for r in records)
    flat = np.concatenate([tested[:HALF], tested[HALF:] + style]).reshape(-1, tested.shape[2])
    classes = np.tile(np.arange(HALF).repeat(20), 2)
    accuracy = {}
    for kinds in (True, False):
        used = records if kinds else [replace(r, modes=np.zeros_like(r.modes)) for r in records]
        found = solve(dict(enumerate(used)), sum(gram_of(r) for r in used))
        accuracy[kinds] = (found.discriminant.scores(flat).argmax(1) == classes).mean()
    assert accuracy[True] > accuracy[False] + 0.02
    plain = records_of(learned)
    assert sum(int(r.modes.max()) for r in plain) <= 1  # one kind of drawing stays one


def test_classes_of_few_images_do_not_lose_to_those_of_many(features):
    learned, tested = features
    records = records_of(learned)
    few = [ClassRecord.of(r.ids[:3], r.kept[:3]) if i % 2 else r for i, r in enumerate(records)]
    groups = groups_of(few, sum(gram_of(r) for r in few))
    basis = Basis.of(groups)
    shrunk = left_out(groups, basis, Trials.of(few, range(CLASSES))).at(0.3).means
    recall = {}
    for known, means in enumerate((Means.of(shrunk.means, groups.counts, basis.shrunk(0.3), 0.0), shrunk)):
        guesses = basis.discriminant(means, 0.3, groups.owners).scores(tested.reshape(-1, tested.shape[2])).argmax(1)
        right = (guesses == np.arange(CLASSES).repeat(20)).reshape(CLASSES, 20).mean(1)
        recall[known] = right[1::2].mean(), right.mean()
    assert recall[1][0] > recall[0][0] + 0.05 and recall[1][1] > recall[0][1]


def test_the_classifier_is_not_behind_scikit_learns_with_ledoit_wolf_shrinkage(features):
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    learned, tested = features
    flat, classes = tested.reshape(-1, tested.shape[2]), np.arange(CLASSES).repeat(20)
    ahead = []
    for count in (20, 10, 5):
        judge = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
        judge.fit(learned[:, :count].reshape(CLASSES * count, -1), np.arange(CLASSES).repeat(count))
        records = records_of(learned[:, :count])
        ours = solve(dict(enumerate(records)), sum(gram_of(r) for r in records)).discriminant.scores(flat).argmax(1)
        ahead.append((ours == classes).mean() - (judge.predict(flat) == classes).mean())
    assert np.mean(ahead) > 0 and min(ahead) > -0.02


def test_percentages_hold_for_classes_of_one_two_five_and_twenty_images(features):
    learned, tested = features
    sizes = np.tile([1, 2, 5, 20], CLASSES // 4)
    certain, right, accepted = [], [], []
    for turn in range(4):  # every class has every size once
        every = records_of(learned)
        records = [ClassRecord.of(r.ids[:n], r.kept[:n]) for r, n in zip(every, np.roll(sizes, turn), strict=True)]
        shares, familiar = model_of({f"{i:02}": r for i, r in enumerate(records)}).judge(tested.reshape(320, -1))
        certain.append(shares.max(1))
        right.append(shares.argmax(1) == np.arange(CLASSES).repeat(20))
        accepted.append(familiar >= 0)
    # 8 images of classes of two, and none of classes of one, are what the temperature can be fitted to
    assert np.mean(certain) == pytest.approx(np.mean(right), abs=0.1)
    assert 0.91 < np.mean(accepted) < 0.98


@pytest.mark.parametrize(("classes", "images"), [(2, 5), (2, 20), (8, 5), (16, 10)])
def test_the_threshold_holds_also_with_few_images(features, classes, images):
    learned, tested = features
    accepted = []
    for start in range(0, CLASSES, classes):
        for first in range(0, 20, images):
            part = records_of(learned[start : start + classes, first : first + images])
            model = model_of({f"{i:02}": r for i, r in enumerate(part)})
            accepted.append(model.judge(tested[start : start + classes].reshape(20 * classes, -1))[1] >= 0)
    assert 0.91 < np.mean(accepted) < 0.98


def test_ten_right_answers_of_ten_do_not_make_the_next_one_certain(features):
    learned, tested = features
    models = [
        model_of({"a": a, "b": b}) for a, *_, b in (records_of(learned[i : i + 2, :5]) for i in range(CLASSES - 1))
    ]
    perfect = [i for i, model in enumerate(models) if model.accuracy == 1.0]
    assert perfect
    for i in perfect:
        assert 0.8 < np.median(models[i].judge(tested[i : i + 2].reshape(40, -1))[0].max(1)) < 0.995
