"""What images that were taught as unknown change: on the embedded drawings, in a few minutes.

Ten kinds of drawings are taught, then drawings of eight other kinds as unknown. Asked are further drawings of the ten
kinds, of the eight, and of eight that were never shown.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from vqprompt import Model

TAUGHT, OTHERS, SEEDS, SIZE = 10, 8, range(5), 56


def main() -> None:
    with (files("vqprompt.assets") / "quickdraw50.npz").open("rb") as file:
        drawings = np.load(file)["images"].reshape(50, 100, 28, 28)
    for each in (1, 6):
        rows = np.array([named(drawings, each, seed) for seed in SEEDS]).mean(0)
        for when, row in zip(("before", "after"), rows, strict=True):
            kinds = zip(("taught", "right", "as unknown", "never shown"), row, strict=True)
            print(f"{each} of each as unknown, {when}:", ", ".join(f"{kind} {share:.1%}" for kind, share in kinds))


def named(drawings: np.ndarray, each: int, seed: int) -> list[list[float]]:
    """Shares of the drawings that got a name, before and after: of the taught kinds (and how many the right one), of
    those taught as unknown, and of those never shown."""
    order = np.random.default_rng(seed).permutation(50)
    known, against, rest = order[:TAUGHT], order[TAUGHT : TAUGHT + OTHERS], order[TAUGHT + OTHERS : TAUGHT + 2 * OTHERS]
    model = Model(size=SIZE)
    model.learn(list(drawings[known, :25].reshape(-1, 28, 28)), [str(kind) for kind in known.repeat(25)])
    asked = {"known": known, "against": against, "rest": rest}
    features = {name: model.embed(list(drawings[kinds, 80:90].reshape(-1, 28, 28))) for name, kinds in asked.items()}

    def shares() -> list[float]:
        answers = {name: model.judge(x) for name, x in features.items()}
        accepted = {name: familiar >= 0 for name, (_, familiar) in answers.items()}
        best = np.array(model.classes)[answers["known"][0].argmax(1)]
        right = accepted["known"] & (best == known.repeat(10).astype(str))
        return [float(x.mean()) for x in (accepted["known"], right, accepted["against"], accepted["rest"])]

    before = shares()
    model.learn(list(drawings[against, :each].reshape(-1, 28, 28)), as_unknown=True)
    return [before, shares()]


if __name__ == "__main__":
    main()
