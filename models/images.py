"""The one definition of how encoded bytes become a model's image input.

The server, the exporter and the load tester all decode through this file, so an accuracy measured offline is the
accuracy that is served. Knows image formats and `ImageSpec`.

The rules, in the order in which they are applied:

    1. Format   Recognised by the first bytes, never by a name or content type: JPEG, PNG, WebP, GIF, BMP, TIFF.
    2. Size     Read from the header before a pixel is decoded. Refused: more than `max_pixels`; sides that differ more
                than 100-fold, which need too much memory to resize; and files in which Pillow finds more than
                `headers.py`, which predicts the memory.
    3. Frame    The first frame of an animation or multi-page file.
    4. Cut off  A file with missing pixels is refused; nothing is filled in.
    5. EXIF     The orientation is applied. An unreadable EXIF block counts as absent.
    6. 16 bits  16-bit grey keeps the upper eight bits, as decoders do for 16-bit colour. Float is refused.
    7. Alpha    Alpha, palette transparency and a transparent key colour are composited onto white.
    8. Colour   CMYK, YCbCr, palettes and grey become RGB; for a one-channel model everything becomes grey
                (ITU-R 601 luma). Colour profiles are ignored, as in training pipelines.
    9. Resize   "exact": directly to height x width. "shorter_side": torchvision's `Resize` (the longer side is
                truncated, not rounded) and then its `CenterCrop`. "letterbox": scaled to fit, both sides rounded, and
                padded, as Ultralytics' LetterBox or YOLOX. With `antialias` these are Pillow's filters,
                bit for bit what torchvision gives for PIL images; without, plain sampling as torch's
                `interpolate(antialias=False)` on tensors. "nearest" is Pillow's in both cases. A letterbox without
                `antialias` and with "bilinear" is bit for bit cv2's INTER_LINEAR.
    10. Values  "bgr" reverses the channels. Front "uint8_nhwc" writes the pixels; "float32_nchw" writes
                (x / 255 - mean) / std.

Pillow's JPEG draft mode (a smaller decode by scaled DCT) is not used: it is another filter than the one in training,
and the answer would depend on the size of the upload.

Two faster ways give the same pixels: `jpeg.py` decodes large plain JPEGs into reused memory, and `windowed.py` computes
little more of a resized image than the crop keeps.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from convoy.models.errors import ImageError
from convoy.models.geometry import Extent, crop_corner, full_size
from convoy.models.headers import JPEG_SEGMENT, Header, read_header
from convoy.models.jpeg import LARGE_PIXELS, large_jpeg, large_jpeg_bytes, plain_jpeg
from convoy.models.kept_memory import KeptMemory
from convoy.models.opencv_linear import resize_linear
from convoy.models.spec import NUMPY_DTYPES, ImageSpec
from convoy.models.windowed import Box, resized_window, sample_without_antialias

# 64 million pixels is more than today's 50-megapixel cameras; Pillow needs 256 MB to decode them.
DEFAULT_MAX_PIXELS = 64_000_000
MAX_ASPECT = 100
# Progressive JPEGs have about ten scans, and large colour profiles some hundred segments. Each scan covers the whole
# image, so a small file with a million scans would block a decoding thread for hours.
MAX_JPEG_SCANS = 100
MAX_JPEG_SEGMENTS = 5_000

# A file within these limits, for a model that is as small, takes less time to decode than to hand to a thread.
TINY_BYTES = 16 << 10
TINY_PIXELS = 64 * 64
# PNG chunks that may be very long, or slow to read.
_SLOW_CHUNKS = (b"zTXt", b"iTXt", b"iCCP", b"eXIf")

# Two pictures of 12 megapixels.
KEPT_MEMORY = KeptMemory(most_bytes=128 << 20)
# The channels to keep of RGBX, RGB and L.
_RAW_MODES = {1: "L", 3: "RGB"}

# Hostile bytes make Pillow warn (odd EXIF, odd TIFF tags) with text chosen by the attacker. The result is an image or
# an ImageError in any case. `warnings.catch_warnings` is not thread-safe, so there is one filter, set once.
warnings.filterwarnings("ignore", module=r"PIL\.")

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Opened by class and not by `Image.open`, which would try other formats, and warn by a process-wide pixel limit before
# ours applies.
_OPENERS: dict[str, Callable[[io.BytesIO], ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
FORMATS = tuple(_OPENERS)
# By their first two bytes.
_SIGNATURES = {
    b"\xff\xd8": ((b"\xff\xd8\xff", "JPEG"),),
    b"\x89P": ((b"\x89PNG\r\n\x1a\n", "PNG"),),
    b"GI": ((b"GIF87a", "GIF"), (b"GIF89a", "GIF")),
    b"BM": ((b"BM", "BMP"),),
    b"II": ((b"II*\x00", "TIFF"),),
    b"MM": ((b"MM\x00*", "TIFF"),),
}


def sniff(encoded: bytes | memoryview) -> str | None:
    """The image format of the first bytes, one of `FORMATS`, or None."""
    start = bytes(encoded[:12])
    for signature, name in _SIGNATURES.get(start[:2], ()):
        if start.startswith(signature):
            return name
    return "WebP" if start[:4] == b"RIFF" and start[8:12] == b"WEBP" else None


def decode_image_into(
    encoded: bytes | memoryview, image: ImageSpec, out: memoryview, max_pixels: int = DEFAULT_MAX_PIXELS
) -> Extent:
    """Decode one image and write one sample into `out`. Returns the width and height that a viewer would show.

    `out` is a writable view of exactly the sample's bytes: uint8 [height, width, channels] for front "uint8_nhwc",
    otherwise float32 [channels, height, width]. After an error, the contents of `out` are undefined. Thread-safe;
    decoding and resizing release the GIL.

    Raises ImageError if the bytes are not an image that the rules accept. For GIF, TIFF and WebP, Pillow's own limit of
    178 million pixels applies as well, whatever `max_pixels` is. A wrong size of `out` is a bug in the caller and
    raises ValueError.
    """
    whole = bytes(encoded)
    with ExitStack() as memory:
        pixels = _upright_pixels(whole, image, max_pixels, memory)
        _write(_resized(pixels, image), image, out)
        return pixels.size


def fit_image_into(
    opened: Image.Image, image: ImageSpec, out: memoryview, max_pixels: int = DEFAULT_MAX_PIXELS
) -> Extent:
    """The same for an open Pillow image, by the rules after the first, with the result that its file would give.

    Uses the current frame. The image is loaded, which only one thread may do at a time, and not changed otherwise.
    Raises ImageError.
    """
    try:
        if not all(opened.size):
            raise ImageError("the image has no pixels; send another one")
        refuse_oversized(opened.size, max_pixels)
        opened.load()
        pixels = _in_colour(_turned_upright(opened, opened), image.channels)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"this image has too many pixels; the limit is {max_pixels}") from error
    except Exception as error:  # its file may be broken or gone, and Pillow then raises nearly anything
        raise ImageError(f"this image is broken or cut off and cannot be decoded ({_brief(error)})") from error
    _write(_resized(pixels, image), image, out)
    return pixels.size


def header_of(opened: Image.Image) -> Header:
    """The header of an open image, for `decoding_bytes`."""
    is_deep = opened.mode == "F" or opened.mode.startswith("I")
    return Header(
        *opened.size,
        pixel_bytes=4,
        has_alpha=opened.has_transparency_data,
        is_deep=is_deep,
        may_turn=True,
        is_rgb=opened.mode == "RGB",
    )


def _write(pixels: bytes, image: ImageSpec, out: memoryview) -> None:
    """Rule 10, for uint8 [height, width, channels]."""
    if image.channel_order == "bgr":
        pixels = np.frombuffer(pixels, np.uint8).reshape(-1, image.channels)[:, ::-1].tobytes()
    if image.front == "uint8_nhwc":
        out[:] = pixels
        return
    values = np.frombuffer(out, NUMPY_DTYPES[image.tensor_dtype]).reshape(image.tensor_shape)
    window = np.frombuffer(pixels, np.uint8).reshape(image.height, image.width, image.channels)
    values[...] = window.transpose(2, 0, 1)
    values /= 255
    values -= np.array(image.mean, np.float32)[:, None, None]
    values /= np.array(image.std, np.float32)[:, None, None]


def decoding_bytes(header: Header, image: ImageSpec) -> int:
    """The peak memory of `decode_image_into`, beside its arguments and a copy of the file.

    Counts Pillow's images, each of which lives until the next is made from it, and numpy's copies of them.
    """
    pixel_bytes = header.pixel_bytes * (2 if header.may_turn else 1) + header.extra_bytes
    if header.is_deep:
        pixel_bytes += 12
    elif header.has_alpha:
        pixel_bytes += 9  # as RGBA, its mask, and the white background
    elif image.channels == 1 or not header.is_rgb:
        pixel_bytes += 4
    resized_bytes = 4 * full_size((max(1, header.width), max(1, header.height)), image)[0] * header.height
    if not (image.antialias or image.interpolation == "nearest"):
        pixel_bytes, resized_bytes = max(pixel_bytes, 10), 0
    return pixel_bytes * header.pixels + resized_bytes + 16 * image.width * image.height


def refuse_oversized(size: tuple[int, int], max_pixels: int, advice: str = "send a smaller one") -> None:
    """Rule 2. Raises ImageError."""
    width, height = size
    if width * height > max_pixels:
        raise ImageError(
            f"the image has {width}x{height} = {width * height} pixels, more than the {max_pixels} allowed; {advice}"
        )
    if max(size) > MAX_ASPECT * min(size):
        raise ImageError(
            f"the image is {width}x{height}; its longer side may be at most {MAX_ASPECT} times the shorter, crop it"
        )


def _refuse_unannounced(size: tuple[int, int], name: str, encoded: bytes) -> None:
    """Refuse a size that the header did not announce, for which no memory was reserved; `size` is what Pillow found."""
    header = read_header(name, memoryview(encoded))
    if header is None or min(size) > min(header[:2]) or max(size) > max(header[:2]):
        raise ImageError(
            f"the header of this {name} image does not match its size of {size[0]}x{size[1]}; save it again"
        )


def is_tiny(kind: str, encoded: memoryview, image: ImageSpec) -> bool:
    """Whether a JPEG or PNG (`kind`), by its header, certainly decodes faster than handing it to a thread."""
    if kind not in ("JPEG", "PNG") or len(encoded) > TINY_BYTES or image.height * image.width > TINY_PIXELS:
        return False
    whole = bytes(encoded)
    if not (_has_few_segments(whole) if kind == "JPEG" else _has_few_chunks(whole)):
        return False
    header = read_header(kind, encoded)
    if header is None or not 0 < header.pixels <= TINY_PIXELS:
        return False
    width, height = full_size((header.width, header.height), image)  # before it is cropped
    return width * height <= TINY_PIXELS


def _has_few_segments(jpeg: bytes) -> bool:
    """Whether it has no more markers than usual files, and no EXIF block."""
    return jpeg.count(b"\xff") - jpeg.count(b"\xff\x00") <= 64 and b"Exif" not in jpeg


def _has_few_chunks(png: bytes) -> bool:
    """Whether it has no more chunks than usual files, and no slow ones."""
    position, chunks = 8, 0
    while position < len(png) and chunks <= 16:
        position += 12 + int.from_bytes(png[position : position + 4])  # length, kind, content, checksum
        chunks += 1
    return chunks <= 16 and not any(kind in png for kind in _SLOW_CHUNKS)


def preprocess(
    encoded: bytes | memoryview, image: ImageSpec, max_pixels: int = DEFAULT_MAX_PIXELS
) -> npt.NDArray[np.uint8] | npt.NDArray[np.float32]:
    """One sample as a new array, of `image.tensor_shape` and `image.tensor_dtype`; see `decode_image_into`."""
    buffer = bytearray(math.prod(image.tensor_shape) * NUMPY_DTYPES[image.tensor_dtype].itemsize)
    decode_image_into(encoded, image, memoryview(buffer), max_pixels)
    if image.front == "uint8_nhwc":
        return np.frombuffer(buffer, np.uint8).reshape(image.tensor_shape)
    return np.frombuffer(buffer, np.float32).reshape(image.tensor_shape)


def _upright_pixels(encoded: bytes, image: ImageSpec, max_pixels: int, memory: ExitStack) -> Image.Image:
    """Rules 1 to 8: an RGB, RGBX or L image of the size that a viewer would show, valid until `memory` is closed."""
    if not encoded:
        raise ImageError(f"the image is empty; send the bytes of a {_or(FORMATS)} file")
    name = sniff(encoded)
    if name is None:
        raise ImageError(f"these bytes are not an image in a supported format; send a {_or(FORMATS)} file")
    try:
        if name == "JPEG":
            _refuse_endless(encoded)
        with _OPENERS[name](io.BytesIO(encoded)) as opened:
            refuse_oversized(opened.size, max_pixels)
            _refuse_unannounced(opened.size, name, encoded)
            if (large := _decode_large(opened, encoded, image, memory)) is not None:
                return _turned_upright(large, opened)
            opened.load()
            return _in_colour(_turned_upright(opened, opened), image.channels)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:  # GIF, TIFF and WebP contain further sizes
        raise ImageError(f"this {name} image has too many pixels; the limit is {max_pixels}") from error
    except Exception as error:  # on hostile bytes Pillow's decoders raise nearly anything
        raise ImageError(f"this {name} image is broken or cut off and cannot be decoded ({_brief(error)})") from error


def _decode_large(opened: ImageFile, encoded: bytes, image: ImageSpec, memory: ExitStack) -> Image.Image | None:
    """An RGBX or L image in reused memory, valid until `memory` is closed; None if Pillow must decode it."""
    is_resized_by_pillow = image.antialias or image.interpolation == "nearest"
    if opened.format != "JPEG" or opened.width * opened.height < LARGE_PIXELS or not is_resized_by_pillow:
        return None
    plain = plain_jpeg(encoded)
    if plain is None or plain.channels != image.channels or (plain.width, plain.height) != opened.size:
        return None
    return large_jpeg(encoded, plain, memory.enter_context(KEPT_MEMORY.begin_decode(large_jpeg_bytes(plain))))


def _refuse_endless(encoded: bytes) -> None:
    """Count a JPEG's segments up to its end marker; what is appended (videos, depth maps) is not decoded."""
    scans, position = 0, 2
    for _ in range(MAX_JPEG_SEGMENTS):
        marker = JPEG_SEGMENT.search(encoded, position)
        if marker is None or (scans and marker[1] == b"\xd9"):
            return
        scans += marker[1] == b"\xda"
        if scans > MAX_JPEG_SCANS:
            break
        position = marker.end()
        if marker[1] != b"\xd9":  # tables for an image that follows
            position += int.from_bytes(encoded[position : position + 2])
    raise ImageError(f"the JPEG has over {MAX_JPEG_SCANS} scans or {MAX_JPEG_SEGMENTS} segments; save it again")


def _turned_upright(image: Image.Image, says_how: Image.Image) -> Image.Image:
    """Rotate an open Pillow image by its metadata."""
    try:
        orientation = says_how.getexif().get(0x0112, 1)
        turn = _UPRIGHT.get(orientation)
    except Exception:  # the pixels are valid, whatever is wrong with the EXIF block
        return image
    return image if turn is None else image.transpose(turn)


def _in_colour(image: Image.Image, channels: int) -> Image.Image:
    """Rules 6 to 8: mode RGB for three channels, L for one."""
    if image.mode == "F":
        raise ImageError("the image has floating-point pixels of unknown range; send 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        image = _on_white(image.convert("RGBA"))
    mode = "RGB" if channels == 3 else "L"
    return image if image.mode == mode else image.convert(mode)  # which would copy


def _on_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


def _resized(source: Image.Image, image: ImageSpec) -> bytes:
    """Rule 9: the pixels as uint8 [height, width, channels]."""
    width, height = full_size(source.size, image)
    left, top = crop_corner((width, height), image)
    if image.resize_mode == "letterbox":
        canvas = np.full((image.height, image.width, image.channels), image.pad_value, np.uint8)
        pixels = np.frombuffer(_window(source, (width, height), (0, 0, width, height), image), np.uint8)
        canvas[-top : height - top, -left : width - left] = pixels.reshape(height, width, image.channels)
        return canvas.tobytes()
    return _window(source, (width, height), (left, top, left + image.width, top + image.height), image)


def _window(source: Image.Image, size: Extent, window: Box, image: ImageSpec) -> bytes:
    """The part `window` of the picture resized to `size`, uint8 [height, width, channels]."""
    if image.antialias or image.interpolation == "nearest":
        kernel = Image.Resampling[image.interpolation.upper()]
        return resized_window(source, size, window, kernel).tobytes("raw", _RAW_MODES[image.channels])
    if image.resize_mode == "letterbox" and image.interpolation == "bilinear":
        return resize_linear(np.asarray(source), size).tobytes()  # the window is all of it
    return sample_without_antialias(np.asarray(source), size, window, image.interpolation).tobytes()


def _or(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _brief(error: Exception) -> str:
    """The error on one line; Pillow's messages may quote bytes of the file."""
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:120]
