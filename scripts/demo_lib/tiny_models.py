# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Small random-weight models, made on disk without any download.

They have the interfaces of the real architectures (processor, chat template,
sizes of the tensors that travel) and almost none of their arithmetic, so that
what is left to see is the way of the tensors.
"""

import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2TokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.utils import logging

CACHE_DIR = Path(__file__).parents[2] / "build" / "tiny-models"
SEED = 31

# Twice Qwen2-VL's edge: the same bytes of pixels in a quarter of the patches, and
# so a sixteenth of the vision tower's attention, which on a CPU would hide the rest.
PATCH_SIZE = 28

# No photograph of up to this size is scaled down.
MAX_IMAGE_PIXELS = 3200 * 3200

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# ChatML; each part of a message's content is either an image or a text.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' %}{{ part.text }}
{%- else %}<|vision_start|><|image_pad|><|vision_end|>{% endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def tiny_qwen2_vl(n_heads: int = 2) -> Path:
    """The folder of a Qwen2-VL with 1 vision layer and 2 text layers, for up to
    `n_heads` tensor-parallel workers."""
    name = "qwen2-vl" if n_heads == 2 else f"qwen2-vl-{n_heads}-heads"
    return _cached(name, functools.partial(_make_qwen2_vl, n_heads))


def pixel_bytes(model: Path, edge: int) -> int:
    """Bytes of the pixel_values that the engine sends for a square image.

    The engine leaves rescaling and normalising to the workers, so each patch holds
    its colour values in one byte, and twice: a still image is a clip of two frames.
    """
    processor = Qwen2VLImageProcessor.from_pretrained(model)
    patches = processor.get_number_of_image_patches(edge, edge)
    return patches * 3 * processor.temporal_patch_size * processor.patch_size**2


def tiny_qwen2() -> Path:
    """The folder of a text-only Qwen2 with 2 layers of hidden size 1024.

    The size makes a prompt of some thousand embeddings a large tensor.
    """
    return _cached("qwen2", _make_qwen2)


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills, made once for each version of this file."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = CACHE_DIR / f"{name}-{version}"
    if folder.is_dir():
        return folder
    CACHE_DIR.mkdir(parents=True, exist_ok=True)
    # Renamed into place, so that an interrupted run leaves no half model
    # behind that the next one would take for a whole one.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=CACHE_DIR))
    try:
        make(unfinished)
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _make_qwen2_vl(n_heads: int, folder: Path) -> None:
    tokenizer = _byte_level_tokenizer()
    size = {"shortest_edge": 56 * 56, "longest_edge": MAX_IMAGE_PIXELS}
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, patch_size=PATCH_SIZE),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size, patch_size=PATCH_SIZE),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen2VLConfig(
        text_config={
            **_text_sizes(tokenizer, hidden_size=32 * n_heads),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                # Halves of a head's rotary pairs: time, height, width.
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            "depth": 1,
            "embed_dim": 16 * n_heads,
            "num_heads": n_heads,
            "mlp_ratio": 2,
            "hidden_size": 32 * n_heads,
            "patch_size": PATCH_SIZE,
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )
    _save_random(Qwen2VLForConditionalGeneration, config, folder)


def _make_qwen2(folder: Path) -> None:
    tokenizer = _byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(**_text_sizes(tokenizer, hidden_size=1024))
    _save_random(Qwen2ForCausalLM, config, folder)


def _text_sizes(tokenizer: Qwen2TokenizerFast, hidden_size: int) -> dict:
    token_id = tokenizer.convert_tokens_to_ids
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 65536,
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
    }


def _byte_level_tokenizer() -> Qwen2TokenizerFast:
    """A tokenizer with one token for each byte and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def _save_random(
    architecture: type[PreTrainedModel],
    config: Qwen2Config | Qwen2VLConfig,
    folder: Path,
) -> None:
    config.dtype = torch.bfloat16
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = architecture(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # The usual 0.02 is so small beside the residual stream that
                # every prompt gets the same answer.
                fan_in = parameter[0].numel()
                torch.nn.init.normal_(parameter, std=2 / fan_in**0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
