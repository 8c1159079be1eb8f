"""Galleries: pictures survive the way into the page, and neighbours are judged rightly."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from co2.report.gallery import Gallery, Picture, data_uri, galleries_html, same_class


def picture(label: str | None, size: int = 8) -> Picture:
    return Picture(np.random.default_rng(size).integers(0, 256, (3, size, size), dtype=np.uint8), label)


def test_a_small_picture_is_kept_to_the_pixel() -> None:
    original = picture("ring", 32)
    encoded = data_uri(original).removeprefix("data:image/png;base64,")
    decoded = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))
    np.testing.assert_array_equal(decoded.transpose(2, 0, 1), original.pixels)


def test_a_large_picture_is_made_smaller_and_not_shown_in_pixels() -> None:
    large = Picture(np.zeros((3, 400, 300), dtype=np.uint8))
    encoded = data_uri(large).removeprefix("data:image/png;base64,")
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (120, 160)
    assert "crisp" not in galleries_html([Gallery(large, {"MoCo": [large]})])
    assert 'class="crisp"' in galleries_html([Gallery(picture("ring"), {"MoCo": []})])


def test_pictures_come_from_tensors() -> None:
    image = torch.arange(48, dtype=torch.uint8).view(3, 4, 4)
    np.testing.assert_array_equal(Picture.of(image, "star").pixels, image.numpy())
    with pytest.raises(ValueError, match=r"uint8 \[3, H, W\]; got float32 \[4, 4, 3\]"):
        Picture.of(torch.zeros(4, 4, 3))


def test_neighbours_are_marked_and_counted() -> None:
    ring, star = picture("ring"), picture("star")
    gallery = Gallery(ring, {"MoCo": [ring, star, star], "CO2": [ring, ring, star]})
    html = galleries_html([gallery])
    assert html.count("✓") == html.count('class="same"') == 3
    assert html.count("✗") == html.count('class="other"') == 3
    assert same_class([gallery, gallery]) == {"MoCo": (2, 6), "CO2": (4, 6)}


def test_without_labels_nothing_is_judged() -> None:
    gallery = Gallery(picture(None), {"MoCo": [picture(None), picture("ring")]})
    html = galleries_html([gallery])
    assert "✓" not in html
    assert "✗" not in html
    assert same_class([gallery]) == {}


def test_names_are_escaped() -> None:
    bad = "<script>'\"&"
    html = galleries_html([Gallery(picture(bad), {bad: [picture(bad)]})])
    assert "<script" not in html
    assert "&lt;script&gt;&#x27;&quot;&amp;" in html
