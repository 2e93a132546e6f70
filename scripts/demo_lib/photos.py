# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Photographs that come with scikit-image, brought to the sizes of large scans."""

import base64
import io
from pathlib import Path

import skimage.data
from PIL import Image

# Beside the module: asking skimage.data for them could start a download.
_FOLDER = Path(skimage.data.__file__).parent
_FILES = {
    "astronaut": "astronaut.png",
    "chelsea": "chelsea.png",
    "coffee": "coffee.png",
    "rocket": "rocket.jpg",
}


def photograph(name: str, edge: int, shift: int = 0) -> Image.Image:
    """A square photograph of `edge` pixels, cut out `shift` pixels off the corner.

    Different shifts are different images to every cache on the way.
    """
    with Image.open(_FOLDER / _FILES[name]) as photo:
        square = photo.convert("RGB").resize((edge + shift, edge + shift))
    return square.crop((shift, shift, edge + shift, edge + shift))


def as_data_url(image: Image.Image) -> str:
    """The image as a JPEG in a `data:` URL."""
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(jpeg.getvalue()).decode()
