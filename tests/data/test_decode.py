"""Every format and mode, written by Pillow and read back with known pixels."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from co2.data.decode import decode_image, read_image, upright_size
from co2.data.source import BadImage
from co2.files import read_bytes

# Four flat quarters of 16 pixels: exact in lossless formats, nearly so in JPEG, and no two turns of it look alike.
COLOURS = np.array([[(250, 20, 30), (20, 240, 40)], [(30, 20, 250), (240, 240, 20)]], dtype=np.uint8)
QUARTERS = COLOURS.repeat(16, axis=0).repeat(24, axis=1)  # [32, 48, 3]


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(data: bytes) -> np.ndarray:
    tensor = decode_image(data)
    assert tensor.dtype == torch.uint8
    assert tensor.is_contiguous()
    assert tensor.shape[0] == 3
    return tensor.permute(1, 2, 0).numpy()  # [H, W, 3]


def largest_error(got: np.ndarray, expected: np.ndarray) -> int:
    assert got.shape == expected.shape
    return int(np.abs(got.astype(int) - expected.astype(int)).max())


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "WEBP"])
def test_lossless_formats_give_back_the_pixels(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    assert largest_error(pixels(saved(Image.fromarray(QUARTERS), kind, **options)), QUARTERS) == 0


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_lossy_formats_come_close(kind: str) -> None:
    data = saved(Image.fromarray(QUARTERS), kind, quality=95)
    middle = np.s_[8::16, 12::24]  # the middle of each quarter, away from the edges
    assert largest_error(pixels(data)[middle], QUARTERS[middle]) <= 6


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])
def test_compressed_tiff(compression: str) -> None:
    data = saved(Image.fromarray(QUARTERS), "TIFF", compression=compression)
    assert largest_error(pixels(data), QUARTERS) == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "GIF", "BMP", "WEBP"])
def test_grey_comes_out_as_three_equal_channels(kind: str) -> None:
    grey = np.full((16, 16), 117, dtype=np.uint8)
    got = pixels(saved(Image.fromarray(grey), kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert largest_error(got, np.full((16, 16, 3), 117, dtype=np.uint8)) <= (1 if kind == "JPEG" else 0)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "GIF"])
def test_one_bit_is_black_and_white(kind: str) -> None:
    bits = np.indices((16, 16)).sum(0) % 2 == 0
    got = pixels(saved(Image.fromarray(bits), kind))
    assert np.array_equal(got, np.where(bits[..., None], 255, 0).astype(np.uint8).repeat(3, 2))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "TIFF", "BMP"])
def test_palette(kind: str) -> None:
    image = Image.fromarray(QUARTERS).quantize(16)
    assert image.mode == "P"
    assert largest_error(pixels(saved(image, kind)), QUARTERS) <= 1


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_transparent_palette_entry_is_laid_over_white(kind: str) -> None:
    numbers = Image.fromarray(np.array([[0, 1], [2, 1]], dtype=np.uint8)).convert("P")
    numbers.putpalette([10, 20, 30, 200, 0, 0, 0, 0, 250])
    got = pixels(saved(numbers, kind, transparency=1))
    expected = [[(10, 20, 30), (255, 255, 255)], [(0, 0, 250), (255, 255, 255)]]
    assert np.array_equal(got, np.array(expected, dtype=np.uint8))


@pytest.mark.parametrize(("mode", "colour"), [("RGBA", (200, 100, 0)), ("LA", (100,))])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_transparency_is_laid_over_white(mode: str, colour: tuple[int, ...], kind: str) -> None:
    image = Image.new(mode, (3, 1))
    for x, alpha in enumerate((255, 0, 51)):  # opaque, clear, a fifth
        image.putpixel((x, 0), (*colour, alpha))
    rgb = np.array(colour * 3 if len(colour) == 1 else colour)
    expected = np.stack([rgb, [255] * 3, np.rint(0.2 * rgb + 0.8 * 255)])[None]
    assert largest_error(pixels(saved(image, kind)), expected) <= 1


def test_a_colour_key_is_transparent_too() -> None:
    got = pixels(saved(Image.fromarray(QUARTERS), "PNG", transparency=(250, 20, 30)))
    expected = QUARTERS.copy()
    expected[:16, :24] = 255
    assert largest_error(got, expected) == 0


def test_cmyk() -> None:
    # No ink is white, full black ink is black, full cyan takes away the red.
    inks = np.array([[(0, 0, 0, 0), (0, 0, 0, 255)], [(255, 0, 0, 0), (0, 255, 255, 0)]], dtype=np.uint8)
    colours = np.array([[(255, 255, 255), (0, 0, 0)], [(0, 255, 255), (255, 0, 0)]], dtype=np.uint8)
    image = Image.frombytes("CMYK", (32, 32), inks.repeat(16, 0).repeat(16, 1).tobytes())
    expected = colours.repeat(16, 0).repeat(16, 1)
    assert largest_error(pixels(saved(image, "TIFF")), expected) == 0
    middle = np.s_[8::16, 8::16]
    assert largest_error(pixels(saved(image, "JPEG", quality=95))[middle], expected[middle]) <= 8


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(kind: str) -> None:
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    got = pixels(saved(Image.fromarray(ramp), kind))
    assert np.array_equal(got, np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2))


def test_a_dark_sixteen_bit_picture_stays_dark() -> None:
    dark = np.full((4, 4), 200, dtype=np.uint16)  # far below the first of 256 steps, though it looks like 8 bits
    assert pixels(saved(Image.fromarray(dark), "PNG")).max() == 1


def test_sixteen_bit_colour_png() -> None:
    """Pillow cannot write these, so the file is put together by hand."""
    colours = np.array([[(65535, 0, 32896)]], dtype=">u2")
    assert largest_error(pixels(_png(2, 16, colours)), np.array([[(255, 0, 128)]])) == 0


def test_sixteen_bit_grey_with_transparency() -> None:
    grey_alpha = np.array([[(25700, 65535), (25700, 0)]], dtype=">u2")
    assert largest_error(pixels(_png(4, 16, grey_alpha)), np.array([[[100] * 3, [255] * 3]])) == 0


def test_the_see_through_value_of_sixteen_bit_grey_is_laid_over_white() -> None:
    grey = Image.fromarray(np.array([[25700, 500]], dtype=np.uint16))
    got = pixels(saved(grey, "PNG", transparency=500))
    assert largest_error(got, np.array([[[100] * 3, [255] * 3]])) == 0


def _png(colour_type: int, bits: int, samples: np.ndarray) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = samples.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in samples)
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 200.0], [0, 100, 200]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 3.0], [0, 64, 255]),  # no range fits: stretched
        ([0.0, float("nan"), 1.0], [0, 0, 255]),
        ([7.5, 7.5, 7.5], [8, 8, 8]),
    ],
)
def test_float_tiff(values: list[float], expected: list[int]) -> None:
    got = pixels(saved(Image.fromarray(np.array([values], dtype=np.float32)), "TIFF"))
    assert got[0].tolist() == [[value] * 3 for value in expected]


def test_thirty_two_bit_tiff() -> None:
    got = pixels(saved(Image.fromarray(np.array([[-(2**20), 0, 2**20]], dtype=np.int32)), "TIFF"))
    assert got[0, :, 0].tolist() == [0, 128, 255]


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((250, 0, 0), (0, 250, 0))]
    for kind in ("GIF", "PNG", "TIFF"):
        assert pixels(saved(frames[0], kind, save_all=True, append_images=frames[1:]))[0, 0].tolist() == [250, 0, 0]
    data = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert pixels(data)[0, 0].tolist() == [250, 0, 0]


# What the standard says of tag 0x0112: which side of the upright picture the file's first row and column show.
STORED = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.transpose(1, 0, 2),
    6: lambda upright: np.rot90(upright, 1),  # the first row is the right side: to be turned clockwise
    7: lambda upright: upright[::-1, ::-1].transpose(1, 0, 2),
    8: lambda upright: np.rot90(upright, -1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_rotated_by_exif_comes_out_upright(kind: str, orientation: int, tmp_path: Path) -> None:
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](QUARTERS)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    data = saved(stored, kind, exif=exif, **options)
    got = pixels(data)
    assert got.shape == QUARTERS.shape
    (tmp_path / "turned").write_bytes(data)
    assert upright_size(tmp_path / "turned") == (48, 32)
    assert largest_error(got[8::16, 12::24], QUARTERS[8::16, 12::24]) <= 6


def test_broken_exif_does_not_spoil_good_pixels() -> None:
    data = saved(Image.fromarray(QUARTERS), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage")
    assert largest_error(pixels(data), QUARTERS) == 0


def noise(kind: str) -> bytes:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    return saved(image, kind, **({"compression": "tiff_lzw"} if kind == "TIFF" else {}))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
def test_truncated_files_are_bad_images(kind: str, share: float, capfd: pytest.CaptureFixture[str]) -> None:
    data = noise(kind)
    with pytest.raises(BadImage):
        decode_image(data[: int(share * len(data))])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF"])
def test_the_reason_says_truncated(kind: str) -> None:
    data = noise(kind)
    with pytest.raises(BadImage, match=r"^truncated file$"):
        decode_image(data[: len(data) // 2])


@settings(max_examples=150)
@given(st.sampled_from(["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"]), st.data())
def test_damage_anywhere_gives_pixels_or_a_bad_image_and_nothing_else(kind: str, choices: st.DataObject) -> None:
    data = bytearray(SMALL[kind])
    for _ in range(choices.draw(st.integers(1, 4))):
        data[choices.draw(st.integers(0, len(data) - 1))] = choices.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(BadImage):
            assert decode_image(bytes(data)).shape[0] == 3


SMALL = {
    kind: saved(Image.fromarray(QUARTERS[::4, ::4]), kind) for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
}


def test_what_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.png").write_text("this is no image")
    (tmp_path / "page.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    reasons = {
        "empty.jpg": "empty file",
        "text.png": "not an image",
        "page.eps": "not an image",  # whatever its name, no other program is started for it
        "pipe.jpg": "not a regular file",
        "folder.jpg": "not a regular file",
        "missing.jpg": "does not exist",
        "empty.jpg/below": "does not exist",
        "nul\0.jpg": "cannot be opened",
    }
    for name, reason in reasons.items():
        with pytest.raises(BadImage, match=reason):
            read_image(f"{tmp_path}/{name}")
    with pytest.raises(BadImage, match="empty file"):
        decode_image(b"")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(SMALL["PNG"])
    path.chmod(0)
    if os.access(path, os.R_OK):  # the administrator may read everything

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(BadImage, match="no permission"):
        read_image(path)


def test_a_decompression_bomb_is_refused_without_unpacking_it() -> None:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    body = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    with pytest.raises(BadImage, match="million pixels"):
        decode_image(b"\x89PNG\r\n\x1a\n" + body + _png(2, 8, np.zeros((1, 1, 3), np.uint8))[33:])


def test_warnings_of_the_decoder_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # half of a bomb: Pillow warns, and decodes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pixels(saved(Image.fromarray(QUARTERS), "PNG")).shape == (32, 48, 3)


def test_threads_that_decode_at_once_leave_warnings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread begins while the other is at it, and ends after it."""
    first_inside, second_done = threading.Event(), threading.Event()
    opened = Image.open

    def slowly(file: io.BytesIO, **options: object) -> Image.Image:
        if threading.current_thread() is first:
            first_inside.set()
            assert second_done.wait(60)
        return opened(file, **options)

    data = saved(Image.fromarray(QUARTERS), "PNG")
    first = threading.Thread(target=decode_image, args=(data,))
    monkeypatch.setattr(Image, "open", slowly)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        first.start()
        assert first_inside.wait(60)
        decode_image(data)
        second_done.set()
        first.join()
        warnings.warn("heard again", stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["heard again"]


def test_a_file_that_comes_in_parts_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "picture.jpg").write_bytes(noise("JPEG"))
    read = os.read
    monkeypatch.setattr(os, "read", lambda number, size: read(number, min(size, 100)))
    assert read_bytes(tmp_path / "picture.jpg") == noise("JPEG")


def test_reading_a_file_is_decoding_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "picture.with.dots.JPEG"
    path.write_bytes(noise("JPEG"))
    assert torch.equal(read_image(path), decode_image(path.read_bytes()))
    assert torch.equal(read_image(os.fsencode(path)), decode_image(path.read_bytes()))
