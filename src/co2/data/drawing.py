"""Pictures that the package draws itself: one of ten shapes, coloured, textured and turned, on a cluttered ground.

Only the outline tells the class: colours, textures, place, size and turn are drawn in the same way for all of them.
Colours come from two narrow families, one warm and light, one blue and dark, of which one is the ground and the other
the object. With colours from everywhere, pictures could be told apart by colour alone, and a network that learns by
telling pictures apart would have no need to look at the shapes.
Picture i of a seed is a function of (seed, split, i) alone, so any of them can be had at any time, in any order and
in any process, and it shows the same scene at every size.
"""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("arrow", "circle", "crescent", "cross", "heart", "hourglass", "ring", "square", "star", "triangle")
SMALLEST_SCENE = 96  # from this size on, a scene has room for several objects
Split = Literal["train", "test"]
_STREAMS: dict[Split, int] = {"train": 0, "test": 1}
_MOST_OBJECTS = 4


@dataclass(frozen=True)
class Picture:
    """A rendered picture and everything that is known about it."""

    image: np.ndarray  # [S, S, 3] uint8
    labels: np.ndarray  # [n] int64: the class of each object
    boxes: np.ndarray  # [n, 4] int64: left, top, right, bottom around its visible pixels; right and bottom exclusive
    masks: np.ndarray  # [n, S, S] bool: its visible pixels


def render(index: int, size: int, seed: int = 0, split: Split = "train", several: bool = False) -> Picture:
    """Draw picture `index`: one object, of class `index % 10`, or with `several` a scene with that and perhaps more."""
    stream = _STREAMS[split] + len(_STREAMS) * several
    key, counter = np.array([seed % 2**64, stream], dtype=np.uint64), np.array([0, 0, index, 0], dtype=np.uint64)
    random = np.random.Generator(np.random.Philox(key=key, counter=counter))
    most = _MOST_OBJECTS if several and size >= SMALLEST_SCENE else 1
    number = int(random.integers(1, most + 1))

    y, x = _pixel_centres(size)
    warm_ground = bool(random.random() < 0.5)
    canvas = _with_distractors(random, _ground(random, warm_ground, x, y))  # [S, S, 3] float32 in 0..1
    labels = np.array([index % len(CLASSES), *random.integers(0, len(CLASSES), number - 1)], dtype=np.int64)
    masks = np.zeros((number, size, size), dtype=bool)
    for position, (centre, radius) in enumerate(_places(random, number)):
        turn = float(random.uniform(0, 2 * math.pi))
        stretch = float(random.uniform(0.88, 1.14))
        outlines = _OUTLINES[CLASSES[labels[position]]]
        cover = _cover(outlines, centre, radius, turn, stretch, size)  # [S, S] in 0..1
        paint = _paint(random, not warm_ground, x, y, radius)  # [S, S, 3]
        canvas += cover[..., None] * (paint - canvas)
        inside = cover >= 0.5
        masks[:position] &= ~inside  # what is drawn later lies in front
        masks[position] = inside
    canvas += random.normal(0, random.uniform(0.0, 0.03), canvas.shape).astype(np.float32)  # sensor noise
    image = (canvas.clip(0, 1) * 255 + 0.5).astype(np.uint8)
    return Picture(image, labels, np.stack([_box(mask) for mask in masks]), masks)


def _pixel_centres(size: int) -> tuple[np.ndarray, np.ndarray]:
    centres = (np.arange(size, dtype=np.float32) + 0.5) / size
    return centres[:, None], centres[None, :]  # y [S, 1], x [1, S], in 0..1


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _colour(random: np.random.Generator, warm: bool) -> np.ndarray:
    """From pink over orange to yellow, or from teal over blue to violet: [3] in 0..1."""
    hue, value = (0.08, 0.88) if warm else (0.60, 0.32)
    hue, value = hue + random.uniform(-0.075, 0.075), value + random.uniform(-0.06, 0.06)
    return np.array(colorsys.hsv_to_rgb(hue % 1, random.uniform(0.25, 0.85), value))


# The ground: a gradient, slow clouds, sometimes stripes, and small blobs and strokes that are none of the shapes.


def _ground(random: np.random.Generator, warm: bool, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    size = x.shape[1]
    first, second = _colour(random, warm), _colour(random, warm)
    angle = random.uniform(0, 2 * math.pi)
    along = math.cos(angle) * (x - 0.5) + math.sin(angle) * (y - 0.5) + 0.5  # [S, S], mostly 0..1
    ground = first + along[..., None] * (second - first)  # [S, S, 3]
    clouds = Image.fromarray(random.normal(0, 1, (5, 5)).astype(np.float32))
    ground += random.uniform(0.0, 0.09) * np.asarray(clouds.resize((size, size), Image.Resampling.BICUBIC))[..., None]
    strength = random.uniform(0.04, 0.10) * (random.random() < 0.4)
    angle, waves, phase = random.uniform(0, math.pi), random.uniform(3, 7), random.uniform(0, 2 * math.pi)
    if strength:
        stripes = np.sin(2 * math.pi * waves * (math.cos(angle) * x + math.sin(angle) * y) + phase)  # [S, S]
        ground += strength * stripes[..., None]
    return ground.astype(np.float32)


def _with_distractors(random: np.random.Generator, ground: np.ndarray) -> np.ndarray:
    size = len(ground)
    fine = _supersampling(size) * size
    for _ in range(2):
        drawing = Image.new("L", (fine, fine))
        draw = ImageDraw.Draw(drawing)
        for place in random.uniform(0, 1, (int(random.integers(0, 4)), 2)):
            angles = np.linspace(0, 2 * math.pi, 7, endpoint=False)
            radii = random.uniform(0.012, 0.05, 7)
            reach = random.normal(0, 0.035, 2)  # draws the blob out into a stroke
            slide = np.where(np.cos(angles)[:, None] > 0, reach, -reach)
            corners = place + slide + radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)  # [7, 2]
            draw.polygon([(float(across), float(down)) for across, down in corners * fine], fill=255)
        cover = _shrink(drawing, size)[..., None]
        colour = _colour(random, bool(random.random() < 0.5)).astype(np.float32)
        ground = ground + 0.8 * cover * (colour - ground)
    return ground


# The objects.


def _places(random: np.random.Generator, number: int) -> list[tuple[np.ndarray, float]]:
    """Centre and radius of each object, in shares of the picture's side; several objects hardly overlap."""
    places: list[tuple[np.ndarray, float]] = []
    largest = {1: 0.48, 2: 0.27, 3: 0.24, 4: 0.21}[number]
    while len(places) < number:
        radius = float(random.uniform(0.7, 1.0)) * largest
        for _ in range(50):
            centre = random.uniform(radius, 1 - radius, 2)
            if all(np.hypot(*(centre - other)) >= 0.9 * (radius + around) for other, around in places):
                break
        else:  # no room left for it: begin again, with other places for all
            places.clear()
            continue
        places.append((centre, radius))
    return places


def _cover(
    outlines: tuple[np.ndarray, ...], centre: np.ndarray, radius: float, turn: float, stretch: float, size: int
) -> np.ndarray:
    """How much of each pixel an object covers: [S, S] in 0..1. The second outline, if any, is a hole."""
    fine = _supersampling(size) * size
    drawing = Image.new("L", (fine, fine))
    draw = ImageDraw.Draw(drawing)
    cosine, sine = math.cos(turn), math.sin(turn)
    rotation = np.array([[cosine, sine], [-sine, cosine]])
    for outline, fill in zip(outlines, (255, 0), strict=False):
        wide = outline * (stretch, 1.0) * (radius / max(stretch, 1.0))
        corners = (centre + wide @ rotation) * fine  # [n, 2] as x, y
        draw.polygon([(float(across), float(down)) for across, down in corners], fill=fill)
    return _shrink(drawing, size)


def _supersampling(size: int) -> int:
    return 4 if size <= 256 else 2


def _shrink(drawing: Image.Image, size: int) -> np.ndarray:
    return np.asarray(drawing.reduce(drawing.width // size), dtype=np.float32) / 255


def _paint(random: np.random.Generator, warm: bool, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """What an object is painted with, over the whole picture: [S, S, 3]. Its class plays no part in it."""
    first = _colour(random, warm)
    second = first + random.uniform(0.4, 0.7) * (random.uniform(0.6, 0.9) * _colour(random, warm) - first)
    angle, phase = random.uniform(0, 2 * math.pi), random.uniform(0, 2 * math.pi)
    waves = random.uniform(0.8, 2.0) / radius
    across = 2 * math.pi * waves * (math.cos(angle) * x + math.sin(angle) * y) + phase  # [S, S]
    texture = random.integers(0, 4)
    if texture == 0:  # plain
        share = np.zeros_like(across)
    elif texture == 1:  # a gradient over the object
        share = 0.5 + 0.5 * np.sin(0.25 * across)
    elif texture == 2:  # stripes
        share = 0.5 + 0.5 * np.tanh(3 * np.sin(across))
    else:  # checks
        along = 2 * math.pi * waves * (math.cos(angle) * y - math.sin(angle) * x) + phase
        share = 0.5 + 0.5 * np.tanh(4 * np.sin(across) * np.sin(along))
    return (first + share[..., None] * (second - first)).astype(np.float32)


def _circle(radius: float = 1.0, corners: int = 96) -> np.ndarray:
    angles = np.linspace(0, 2 * math.pi, corners, endpoint=False)
    return radius * np.stack([np.cos(angles), np.sin(angles)], 1)


def _star() -> np.ndarray:
    return _circle(corners=10) * np.where(np.arange(10) % 2, 0.40, 1.0)[:, None]


def _crescent() -> np.ndarray:
    """A disc less another one that is shifted to the right: outer arc, then back along the inner one."""
    radius, shift = 0.82, 0.5
    meet_x = (1 + shift**2 - radius**2) / (2 * shift)
    outer_angle = math.acos(meet_x)
    inner_angle = math.atan2(math.sqrt(1 - meet_x**2), meet_x - shift)
    outer = np.linspace(outer_angle, 2 * math.pi - outer_angle, 64)
    inner = np.linspace(2 * math.pi - inner_angle, inner_angle, 64)
    back = radius * np.stack([np.cos(inner), np.sin(inner)], 1) + (shift, 0)
    return np.concatenate([np.stack([np.cos(outer), np.sin(outer)], 1), back])


def _heart() -> np.ndarray:
    t = np.linspace(0, 2 * math.pi, 96, endpoint=False)
    across = 16 * np.sin(t) ** 3
    up = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([across, -up], 1)


def _fitted(*outlines: np.ndarray) -> tuple[np.ndarray, ...]:
    """Moved and scaled so that the first outline fills the circle of radius 1 around the origin."""
    middle = (outlines[0].max(0) + outlines[0].min(0)) / 2
    reach = np.hypot(*(outlines[0] - middle).T).max()
    return tuple((outline - middle) / reach for outline in outlines)


_CROSS = [(-1, -3), (1, -3), (1, -1), (3, -1), (3, 1), (1, 1), (1, 3), (-1, 3), (-1, 1), (-3, 1), (-3, -1), (-1, -1)]
_ARROW = [(-10, -3), (0, -3), (0, -9), (10, 0), (0, 9), (0, 3), (-10, 3)]
_HOURGLASS = [(-7, -10), (7, -10), (1.2, 0), (7, 10), (-7, 10), (-1.2, 0)]
_OUTLINES: dict[str, tuple[np.ndarray, ...]] = {
    "arrow": _fitted(np.array(_ARROW, dtype=float)),
    "circle": _fitted(_circle()),
    "crescent": _fitted(_crescent()),
    "cross": _fitted(np.array(_CROSS, dtype=float)),
    "heart": _fitted(_heart()),
    "hourglass": _fitted(np.array(_HOURGLASS, dtype=float)),
    "ring": _fitted(_circle(), _circle(0.55)),
    "square": _fitted(_circle(corners=4)),
    "star": _fitted(_star()),
    "triangle": _fitted(_circle(corners=3)),
}
