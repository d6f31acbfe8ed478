"""Images of conversations: files, known by the hash of what they hold, and decoded again each time one is looked at.

A message's content is then a list of parts, {"type": "text", "text": ...} or {"type": "image", "path": ...}; a path is relative
to the folder of the data file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qad.errors import DataError, UsageError
from qad.untrusted import regular_bytes

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MOST_PIXELS = 1 << 26
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, ArithmeticError, LookupError)  # by Pillow, for what no image is


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image file and the sha256 of what it holds."""

    path: str
    sha256: str

    def open(self) -> Any:
        """The image in RGB, decoded and turned upright. Raises DataError where the file is another one now, or is broken."""
        from PIL import Image, ImageOps

        content = _content(Path(self.path), "")
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise DataError(f"image {self.path} has changed since it was read: start again, or put the file back")
        try:
            with Image.open(io.BytesIO(content), formats=_FORMATS) as opened:
                image: Image.Image = ImageOps.exif_transpose(opened)
                if image.mode == "RGBA":  # on white, as vLLM has it
                    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
                return image.convert("RGB")
        except _BROKEN as error:
            raise DataError(f"image {self.path} cannot be decoded ({error}): mend it or leave it out") from error


def take_pictures(
    messages: Iterable[Mapping[str, object]], folder: Path, where: str
) -> tuple[list[dict[str, object]], tuple[Picture, ...]]:
    """Messages as a template takes them, whose image parts name no file, and the images in order.

    Raises DataError for a file that is missing, is no image or has more than 67 million pixels, UsageError without Pillow.
    """
    taken, pictures = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                if part["type"] == "image":
                    path = (folder / Path(part["path"]).expanduser()).absolute()
                    pictures.append(_picture(path, where))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        taken.append(dict(message))
    return taken, tuple(pictures)


def require_readable_images() -> None:
    """Raises UsageError without Pillow."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UsageError("text with images needs Pillow: pip install 'nvfp4-qad[vision]'") from error


def _picture(path: Path, where: str) -> Picture:
    require_readable_images()
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(
            f"{where}: image {path} cannot be read ({error.strerror}): paths are relative to the data file"
        ) from error
    return _known(path, stat.st_size, stat.st_mtime_ns, where)


@functools.lru_cache(maxsize=1 << 16)
def _known(path: Path, size: int, modified: int, where: str) -> Picture:
    """Every role of a recipe reads the same file: it is read once while size and modification time stay."""
    from PIL import Image

    content = _content(path, f"{where}: ")
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: {path} is no image that is read here ({', '.join(_FORMATS)}): {error}") from error
    if width * height > _MOST_PIXELS:
        raise DataError(f"{where}: image {path} has {width} x {height} pixels, {_MOST_PIXELS:,} at most: make it smaller")
    return Picture(str(path), hashlib.sha256(content).hexdigest())


def _content(path: Path, where: str) -> bytes:
    try:
        return regular_bytes(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{where}image {path} cannot be read ({error}): check the path") from error
