# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Dropping the large host tensors of multi-modal inputs once they are used.

A worker keeps the inputs of a request until the request ends, though it reads
their tensors only to run the encoder. Where the tensors lie in shared memory, that
bounds how many large images may be in flight. Here they are dropped as soon as the
tokens of their item are computed.

The scheduler runs the encoder for items in the window of tokens that it schedules
and for no others, and that window never moves back but by
- preemption: on resume a model runner V2 gets the whole request again, and to V1
  the scheduler sends the items again (`resend_mm_features`);
- the next input of a streaming session, which comes with items of its own;
- a KV transfer that failed: with a connector nothing is dropped.
Rejected draft tokens are behind the prompt, and so behind its items.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from vllm.utils.jsontree import json_iter_leaves

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    Features: TypeAlias = list[MultiModalFeatureSpec]

# What is smaller is not worth a look at each step. No larger than what the tensor
# arena takes.
_MIN_BYTES = 8 << 20


def releases_mm_inputs(vllm_config: "VllmConfig") -> bool:
    """Whether inputs may be dropped early. Scheduler and workers must agree."""
    parallel_config = vllm_config.parallel_config
    model_config = vllm_config.model_config
    mm_config = model_config.multimodal_config
    return (
        parallel_config.enable_shm_tensor_arena
        # In one process the scheduler keeps the same tensors anyway; with Ray it has
        # not been tried.
        and parallel_config.distributed_executor_backend == "mp"
        # Workers of another node read the flag of their own command line.
        and parallel_config.nnodes_within_dp == 1
        and mm_config is not None
        # Computed tokens may be lost again, or be an encoder's on another node.
        and vllm_config.kv_transfer_config is None
        and vllm_config.ec_transfer_config is None
        # Its inputs are counted by address, and cannot be sent twice.
        and mm_config.mm_processor_cache_type != "shm"
        # All of its items lie at token 0, whatever their length.
        and not model_config.is_encoder_decoder
        # Another scheduler may send less, or move its window otherwise.
        and vllm_config.scheduler_config.scheduler_cls is None
    )


class MMInputRelease:
    """Drops the large inputs of a worker's requests once they are not needed.

    Args:
        get: Gives the items of a request, by its id, as the model runner keeps them.
        put: Makes the model runner keep other ones. Neither a list nor an item is
            ever changed: others may have them, such as the message they came in.

    """

    def __init__(
        self, get: Callable[[str], "Features"], put: Callable[[str, "Features"], None]
    ):
        self._get = get
        self._put = put
        # Request id -> where the first of its large items ends.
        self._ends: dict[str, int] = {}

    def on_step(self, scheduler_output: "SchedulerOutput") -> None:
        """Called for each step when its requests are known and before the encoder
        runs."""
        for req_id in scheduler_output.finished_req_ids:
            self._ends.pop(req_id, None)
        # Not only what is new: a streaming session, and on a model runner V2 also
        # what resumes, comes as if it were.
        for new in scheduler_output.scheduled_new_reqs:
            self._watch(new.req_id, new.mm_features)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, features in getattr(cached, "resumed_mm_features", {}).items():
            self._put(req_id, features)
            self._watch(req_id, features)
        if not self._ends:
            return
        for req_id, n_computed in zip(cached.req_ids, cached.num_computed_tokens):
            if n_computed < self._ends.get(req_id, n_computed + 1):
                continue
            features = _without_used(self._get(req_id), n_computed)
            self._put(req_id, features)
            self._watch(req_id, features)

    def _watch(self, req_id: str, features: "Features") -> None:
        ends = [_end(f) for f in features if _is_large(f)]
        if ends:
            self._ends[req_id] = min(ends)
        else:
            self._ends.pop(req_id, None)


def release_from_requests(
    vllm_config: "VllmConfig", requests: dict[str, "CachedRequestState"]
) -> MMInputRelease | None:
    """Of a model runner V1; None if nothing may be dropped."""
    if not releases_mm_inputs(vllm_config):
        return None

    def put(req_id: str, features: "Features") -> None:
        requests[req_id].mm_features = features

    return MMInputRelease(lambda req_id: requests[req_id].mm_features, put)


def release_from_encoder_cache(
    vllm_config: "VllmConfig", encoder_cache: "EncoderCache"
) -> MMInputRelease | None:
    """Of a model runner V2; None if nothing may be dropped."""
    if not releases_mm_inputs(vllm_config):
        return None
    features = encoder_cache.mm_features
    return MMInputRelease(features.__getitem__, features.__setitem__)


def resend_mm_features(
    vllm_config: "VllmConfig",
    cached: "CachedRequestData",
    resumed: Iterable["Request"],
) -> None:
    """Send the items of requests that resume again. Called by the scheduler of a
    model runner V1, which keeps requests through a preemption, without what
    `MMInputRelease` has dropped."""
    if not releases_mm_inputs(vllm_config):
        return
    features = {
        request.request_id: _without_used(
            request.mm_features, request.num_computed_tokens
        )
        for request in resumed
        if any(map(_is_large, request.mm_features))
    }
    if features:
        # Not a field: without it the message is the same to the byte.
        cached.resumed_mm_features = features  # type: ignore[attr-defined]


def _without_used(features: "Features", n_computed: int) -> "Features":
    """The items, without the data of large ones that are not needed any more."""
    # Items may overlap (a video and its audio), and the scheduler's search for those
    # in its window may then find one that ends before it. What overlaps is dropped
    # together.
    for f in reversed(features):
        if f.mm_position.offset < n_computed < _end(f):
            n_computed = f.mm_position.offset
    return [
        replace(f, data=None) if _end(f) <= n_computed and _is_large(f) else f
        for f in features
    ]


def _end(feature: "MultiModalFeatureSpec") -> int:
    return feature.mm_position.offset + feature.mm_position.length


def _is_large(feature: "MultiModalFeatureSpec") -> bool:
    if feature.data is None:
        return False
    return any(
        isinstance(leaf, torch.Tensor) and leaf.nbytes >= _MIN_BYTES
        for elem in feature.data.values()
        for leaf in json_iter_leaves(elem.data)
    )
