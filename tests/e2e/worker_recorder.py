# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a worker receives, asked through `collective_rpc`."""

import hashlib
import sys
from typing import Any

import torch

ARENA_MODULE = "vllm.distributed.device_communicators.shm_tensor_arena"


def digest(tensor: torch.Tensor) -> str:
    """Of the shape, the dtype and every byte."""
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
    described = f"{tuple(tensor.shape)} {tensor.dtype} ".encode()
    return hashlib.sha256(described + raw.data).hexdigest()


def mm_digests(mm_features: list[Any]) -> list[str]:
    """Of the pixel_values of each image of a request."""
    return [digest(feature.data["pixel_values"].data) for feature in mm_features]


class WorkerRecorder:
    """Mixed into vLLM's worker class (`worker_extension_cls`)."""

    model_runner: Any

    def start_recording(self) -> None:
        self.recorded: dict[str, list] = {"digests": [], "step_tokens": []}
        execute_model = self.model_runner.execute_model

        def recording(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            # Before the model has had a chance to change anything.
            for request in scheduler_output.scheduled_new_reqs:
                self.recorded["digests"] += mm_digests(request.mm_features)
                if request.prompt_embeds is not None:
                    self.recorded["digests"].append(digest(request.prompt_embeds))
            tokens = scheduler_output.total_num_scheduled_tokens
            if tokens:
                self.recorded["step_tokens"].append(tokens)
            return execute_model(scheduler_output, *args, **kwargs)

        self.model_runner.execute_model = recording

    def what_arrived(self) -> dict[str, list]:
        return self.recorded

    def has_arena_module(self) -> bool:
        return ARENA_MODULE in sys.modules
