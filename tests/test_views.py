"""Crops, flips and resizing: against Pillow, by hand, and in distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vqprompt.core.backbones.vit import ViTConfig
from vqprompt.core.data.decode import to_pixels
from vqprompt.core.data.views import central_boxes, random_boxes, render

WHOLE = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
RNG = np.random.default_rng(0)


def config(size: int, **normalization) -> ViTConfig:
    plain = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255,) * 3}  # images come out as they went in, 0–255
    return ViTConfig(patch=1, image_size=size, **plain | normalization)


def noise(side: int, channels: int = 3, count: int = 1) -> torch.Tensor:
    return torch.from_numpy(RNG.integers(0, 256, (count, channels, side, side), np.uint8))


def as_image(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def as_array(image: Image.Image) -> np.ndarray:
    return np.asarray(image, float).transpose(2, 0, 1)


class TestRender:
    @pytest.mark.parametrize(("source", "target"), [(32, 28), (80, 70), (28, 70), (50, 14), (9, 9), (256, 224)])
    def test_whole_image_is_pillow_s_bilinear(self, source, target):
        pixels = noise(source)
        found = render(pixels, WHOLE, None, config(target), torch.float32)[0].numpy()
        expected = as_array(as_image(pixels[0]).resize((target, target), Image.Resampling.BILINEAR))
        assert found.shape == (3, target, target)
        assert abs(found - expected).max() <= 1.01  # Pillow rounds twice, after each direction

    def test_any_box_is_pillow_s(self):
        pixels, boxes = (
            noise(40, count=3),
            torch.tensor([[0.1, 0.2, 0.8, 0.9], [0.0, 0.5, 0.3, 1.0], [0.25, 0.25, 0.75, 0.75]]),
        )
        found = render(pixels, boxes, None, config(12), torch.float32).numpy()
        for i, box in enumerate(boxes):
            cut = as_image(pixels[i]).resize((12, 12), Image.Resampling.BILINEAR, box=tuple((box * 40).tolist()))
            inner = np.s_[:, 2:-2, 2:-2]  # at the rim we look beyond the box, Pillow does not
            assert abs(found[i][inner] - as_array(cut)[inner]).max() <= 1.5

    def test_same_size_is_exact(self):
        pixels = noise(24)
        assert torch.equal(render(pixels, WHOLE, None, config(24), torch.float32), pixels.float())

    def test_flips_mirror_the_chosen_images_only(self):
        pixels, flips = noise(30, count=4), torch.tensor([True, False, False, True])
        boxes = torch.tensor([[0.1, 0.2, 0.7, 0.9]]).repeat(4, 1)
        plain = render(pixels, boxes, None, config(20), torch.float32)
        found = render(pixels, boxes, flips, config(20), torch.float32)
        torch.testing.assert_close(found[flips], plain[flips].flip(-1), rtol=1e-4, atol=1e-3)
        assert torch.equal(found[~flips], plain[~flips])

    def test_normalization(self):
        pixels = noise(8)
        mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
        found = render(pixels, WHOLE, None, config(8, mean=mean, std=std), torch.float32)
        for c in range(3):
            torch.testing.assert_close(found[0, c], (pixels[0, c] / 255 - mean[c]) / std[c])

    def test_grey_pixels_fill_three_channels(self):
        pixels = noise(16, channels=1)
        mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
        grey = render(pixels, WHOLE, None, config(8, mean=mean, std=std), torch.float32)
        rgb = render(pixels.repeat(1, 3, 1, 1), WHOLE, None, config(8, mean=mean, std=std), torch.float32)
        assert grey.shape == (1, 3, 8, 8)
        torch.testing.assert_close(grey, rgb)

    def test_half_precision_stays_close(self):
        pixels = noise(32)
        exact = render(pixels, WHOLE, None, config(28), torch.float32)
        assert (render(pixels, WHOLE, None, config(28), torch.bfloat16) - exact).abs().max() < 4


class TestCentralBoxes:
    @pytest.mark.parametrize(("width", "height"), [(60, 40), (40, 60), (50, 50)])
    def test_is_a_square_of_the_original_image(self, width, height):
        """Squashed to a square, cropped by the box: what cropping the original by hand gives."""
        ramp = np.stack(
            np.broadcast_arrays(np.linspace(20, 230, width), np.linspace(20, 230, height)[:, None], 128), -1
        )
        image = Image.fromarray(ramp.astype(np.uint8))
        box = central_boxes(torch.tensor([width / height]), 0.875)
        pixels = torch.from_numpy(to_pixels(image, 64).copy())[None]
        found = render(pixels, box, None, config(28), torch.float32)[0].numpy()
        side = 0.875 * min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        by_hand = image.resize((28, 28), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
        assert abs(found - as_array(by_hand)).max() < 4

    def test_numbers(self):
        boxes = central_boxes(torch.tensor([2.0, 0.5, 1.0]), 0.8)
        expected = [[0.3, 0.1, 0.7, 0.9], [0.1, 0.3, 0.9, 0.7], [0.1, 0.1, 0.9, 0.9]]
        torch.testing.assert_close(boxes, torch.tensor(expected))

    def test_zero_is_the_whole_image(self):
        assert torch.equal(central_boxes(torch.tensor([2.0, 1.0]), 0), WHOLE.repeat(2, 1))


class TestRandomBoxes:
    @given(st.floats(0.05, 20), st.integers(0, 999))
    def test_stay_inside(self, aspect, seed):
        boxes = random_boxes(torch.full((50,), aspect), torch.Generator().manual_seed(seed))
        x0, y0, x1, y1 = boxes.unbind(1)
        assert boxes.min() >= -1e-6 and boxes.max() <= 1 + 1e-6
        assert (x1 > x0).all() and (y1 > y0).all()
        shape = (x1 - x0) / (y1 - y0) * aspect  # in pixels of the original
        assert (shape > 3 / 4 - 1e-3).all() and (shape < 4 / 3 + 1e-3).all()

    @pytest.mark.parametrize("aspect", [1.0, 1.5, 0.6])
    def test_distribution_is_that_of_the_textbook(self, aspect):
        """Drawn one by one with rejection, as RandomResizedCrop does it; compared in mean and quantiles."""
        count = 20_000
        boxes = random_boxes(torch.full((count,), aspect), torch.Generator().manual_seed(0)).double().numpy()
        found = self.measures(boxes, aspect)
        expected = self.measures(self.textbook(count, aspect), aspect)
        for name in found:
            quantiles = [np.quantile(values[name], [0.05, 0.25, 0.5, 0.75, 0.95]) for values in (found, expected)]
            np.testing.assert_allclose(*quantiles, atol=0.025, err_msg=name)

    @staticmethod
    def measures(boxes, aspect):
        width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
        return {
            "area": width * height, "log shape": np.log(width / height * aspect),
            "left": boxes[:, 0], "top": boxes[:, 1], "right": boxes[:, 2], "bottom": boxes[:, 3],
        }  # fmt: skip

    @staticmethod
    def textbook(count, aspect):
        rng, found = np.random.default_rng(1), []
        while len(found) < count:
            area = rng.uniform(0.08, 1) * aspect  # an image of height 1
            shape = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = math.sqrt(area * shape), math.sqrt(area / shape)
            if w <= aspect and h <= 1:
                x, y = rng.uniform(0, aspect - w), rng.uniform(0, 1 - h)
                found.append((x / aspect, y, (x + w) / aspect, y + h))
        return np.array(found)

    def test_an_image_no_crop_fits_gets_the_largest_central_box(self):
        wide, tall = random_boxes(torch.tensor([1000.0, 0.001]), torch.Generator().manual_seed(0))
        torch.testing.assert_close(wide, torch.tensor([0.5 - 1 / 1500, 0, 0.5 + 1 / 1500, 1]), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(tall, torch.tensor([0, 0.5 - 1 / 1500, 1, 0.5 + 1 / 1500]), rtol=1e-4, atol=1e-6)
