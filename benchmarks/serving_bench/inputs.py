# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The prompts of the benchmark, named so that both sides can speak of them.

2048      one image of 2048 x 2048 pixels
6x2048    six of them in one prompt
text      a prompt of 256 tokens
embeds64  prompt_embeds of 64 MB
"""

import re
from dataclasses import dataclass
from typing import Any

TEXT_TOKENS = 256
_NAME = re.compile(r"(?:(?P<n>\d+)x)?(?P<side>\d+)|embeds(?P<mb>\d+)|text")

# Of the Qwen-VL families.
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_PROMPT = "<|im_start|>user\n{}What is this?<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Input:
    """What a name stands for."""

    name: str
    n_images: int = 0
    side: int = 0
    embeds_bytes: int = 0

    @property
    def is_text(self) -> bool:
        return not (self.n_images or self.embeds_bytes)


def parse(name: str) -> Input:
    """Raises ValueError if the name stands for nothing."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no input: 2048, 6x2048, embeds64 or text")
    if match["side"]:
        return Input(name, int(match["n"] or 1), int(match["side"]))
    return Input(name, embeds_bytes=int(match["mb"] or 0) * 10**6)


def prompt(wanted: Input, seed: int, hidden_size: int) -> dict[str, Any]:
    """The prompt as `LLM.generate` takes it, the same for the same seed."""
    import numpy as np

    noise = np.random.default_rng(seed)
    if wanted.embeds_bytes:
        import torch

        tokens = wanted.embeds_bytes // (2 * hidden_size)
        values = noise.standard_normal((tokens, hidden_size), dtype=np.float32)
        return {"prompt_embeds": torch.from_numpy(values).to(torch.bfloat16)}
    if wanted.is_text:
        return {"prompt_token_ids": noise.integers(1, 200, TEXT_TOKENS).tolist()}
    from PIL import Image

    shape = (wanted.side, wanted.side, 3)
    images = [
        Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8))
        for _ in range(wanted.n_images)
    ]
    return {
        "prompt": _PROMPT.format(_IMAGE * wanted.n_images),
        "multi_modal_data": {"image": images},
    }
