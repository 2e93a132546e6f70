# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Large multi-modal inputs are dropped once used, and never before."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import OPTConfig

from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.utils import get_mm_features_in_window, strip_covered_mm_data
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request
from vllm.v1.worker import mm_input_release
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.mm_input_release import (
    release_from_encoder_cache,
    release_from_requests,
    resend_mm_features,
)

LARGE = 8 << 20


def vllm_config(**changes):
    config = {
        "enable_shm_tensor_arena": True,
        "distributed_executor_backend": "mp",
        "nnodes_within_dp": 1,
        "multimodal_config": SimpleNamespace(mm_processor_cache_type="lru"),
        "kv_transfer_config": None,
        "ec_transfer_config": None,
        "is_encoder_decoder": False,
        "scheduler_cls": None,
    } | changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            enable_shm_tensor_arena=config["enable_shm_tensor_arena"],
            distributed_executor_backend=config["distributed_executor_backend"],
            nnodes_within_dp=config["nnodes_within_dp"],
        ),
        model_config=SimpleNamespace(
            multimodal_config=config["multimodal_config"],
            is_encoder_decoder=config["is_encoder_decoder"],
        ),
        kv_transfer_config=config["kv_transfer_config"],
        ec_transfer_config=config["ec_transfer_config"],
        scheduler_config=SimpleNamespace(scheduler_cls=config["scheduler_cls"]),
    )


def item(offset: int, length: int, nbytes: int = LARGE) -> MultiModalFeatureSpec:
    # Nobody touches the memory, so there is none.
    pixels = torch.empty(nbytes, dtype=torch.uint8)
    elem = MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem({"pixel_values": elem}),
        modality="image",
        identifier=f"{offset}+{length}",
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def new_request(req_id: str, features: list, n_computed: int = 0) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=[],
        mm_features=features,
        sampling_params=None,
        pooling_params=None,
        block_ids=([],),
        num_computed_tokens=n_computed,
        lora_request=None,
    )


def step(new=(), computed=None, finished=(), resumed=()) -> SchedulerOutput:
    """computed: request id -> tokens computed in the steps before."""
    computed = computed or {}
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(new)
    output.finished_req_ids = set(finished)
    cached = CachedRequestData.make_empty()
    cached.req_ids = list(computed)
    cached.num_computed_tokens = list(computed.values())
    cached.resumed_req_ids = {request.request_id for request in resumed}
    resend_mm_features(vllm_config(), cached, resumed)
    output.scheduled_cached_reqs = cached
    return output


class WorkerV1:
    """What of a model runner V1 keeps items: a request through a preemption."""

    def __init__(self):
        self.requests: dict = {}
        self.release = release_from_requests(vllm_config(), self.requests)

    def run(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids:
            del self.requests[req_id]
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(mm_features=new.mm_features)
        self.release.on_step(output)

    def items(self, req_id: str) -> list[MultiModalFeatureSpec]:
        return self.requests[req_id].mm_features

    def resume(self, request) -> SchedulerOutput:
        computed = {request.request_id: request.num_computed_tokens}
        return step(computed=computed, resumed=[request])


class WorkerV2(WorkerV1):
    """A model runner V2 forgets a request that is preempted."""

    def __init__(self):
        self.encoder_cache = EncoderCache()
        self.release = release_from_encoder_cache(vllm_config(), self.encoder_cache)

    def run(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids:
            self.encoder_cache.remove_request(req_id)
        for new in output.scheduled_new_reqs:
            self.encoder_cache.add_request(new.req_id, new.mm_features)
        self.release.on_step(output)

    def items(self, req_id: str) -> list[MultiModalFeatureSpec]:
        return self.encoder_cache.mm_features[req_id]

    def resume(self, request) -> SchedulerOutput:
        self.encoder_cache.remove_request(request.request_id)
        n_computed = request.num_computed_tokens
        features = strip_covered_mm_data(request.mm_features, n_computed)
        return step([new_request(request.request_id, features, n_computed)])


@pytest.fixture(params=[WorkerV1, WorkerV2])
def worker(request):
    return request.param()


def has_data(worker, req_id: str = "a") -> list[bool]:
    return [feature.data is not None for feature in worker.items(req_id)]


def test_an_item_is_kept_until_its_tokens_are_computed(worker):
    features = [item(10, 20)]
    pixels = weakref.ref(features[0].data["pixel_values"].data)
    worker.run(step([new_request("a", features)]))
    del features
    for n_computed in (5, 10, 29):
        worker.run(step(computed={"a": n_computed}))
        assert has_data(worker) == [True]
    worker.run(step(computed={"a": 30}))
    assert has_data(worker) == [False]
    assert pixels() is None
    assert worker.items("a")[0].mm_position == PlaceholderRange(offset=10, length=20)
    assert worker.items("a")[0].identifier == "10+20"


def test_items_go_one_after_the_other(worker):
    worker.run(step([new_request("a", [item(0, 10), item(15, 10), item(30, 10)])]))
    for n_computed, expected in {
        9: [True, True, True],
        12: [False, True, True],
        27: [False, False, True],
        28: [False, False, True],
        64: [False, False, False],
        65: [False, False, False],
    }.items():
        worker.run(step(computed={"a": n_computed}))
        assert has_data(worker) == expected


def test_small_items_and_other_requests_are_left_alone(worker):
    small = item(0, 10, LARGE - 1)
    worker.run(step([new_request("a", [small, item(10, 10)])]))
    worker.run(step([new_request("b", [item(0, 10)])], computed={"a": 20}))
    worker.run(step(computed={"a": 21, "b": 5}))
    assert has_data(worker, "a") == [True, False]
    assert has_data(worker, "b") == [True]


def test_lists_and_items_that_came_are_not_changed(worker):
    features = [item(0, 10), item(10, 10)]
    kept = list(features)
    worker.run(step([new_request("a", features)]))
    worker.run(step(computed={"a": 20}))
    assert has_data(worker) == [False, False]
    assert features[0] is kept[0] and features[1] is kept[1]
    assert all(feature.data is not None for feature in features)


def test_an_id_may_be_used_again(worker):
    worker.run(step([new_request("a", [item(0, 10)])]))
    worker.run(step([new_request("a", [item(50, 10)])], finished=["a"]))
    worker.run(step(computed={"a": 20}))
    assert has_data(worker) == [True]
    worker.run(step(finished=["a"]))
    worker.run(step([new_request("a", [])]))
    worker.run(step(computed={"a": 100}))
    assert worker.items("a") == []


def test_the_next_input_of_a_streaming_session_is_watched(worker):
    worker.run(step([new_request("a", [item(0, 10)])]))
    worker.run(step(computed={"a": 20}))
    features = strip_covered_mm_data([item(0, 10), item(30, 10)], 20)
    worker.run(step([new_request("a", features, 20)]))
    assert has_data(worker) == [False, True]
    worker.run(step(computed={"a": 40}))
    assert has_data(worker) == [False, False]


@pytest.mark.parametrize(
    "n_hit, expected", [(0, [True, True]), (15, [False, True]), (30, [False, False])]
)
def test_a_request_that_resumes_has_what_it_needs(worker, n_hit, expected):
    """n_hit: what the prefix cache still has of it."""
    features = [item(0, 10), item(20, 10)]
    worker.run(step([new_request("a", features)]))
    worker.run(step(computed={"a": 35}))
    assert has_data(worker) == [False, False]
    request = SimpleNamespace(
        request_id="a", mm_features=features, num_computed_tokens=n_hit
    )
    worker.run(worker.resume(request))
    assert has_data(worker) == expected
    worker.run(step(computed={"a": 35}))
    assert has_data(worker) == [False, False]


def test_small_items_are_not_sent_again():
    request = SimpleNamespace(
        request_id="a", mm_features=[item(0, 10, LARGE - 1)], num_computed_tokens=0
    )
    cached = CachedRequestData.make_empty()
    resend_mm_features(vllm_config(), cached, [request])
    assert vars(cached) == vars(CachedRequestData.make_empty())


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_shm_tensor_arena": False},
        {"distributed_executor_backend": "uni"},
        {"distributed_executor_backend": "ray"},
        # Their workers' flag is that of their own command line.
        {"nnodes_within_dp": 2},
        {"multimodal_config": None},
        {"multimodal_config": SimpleNamespace(mm_processor_cache_type="shm")},
        {"kv_transfer_config": object()},
        {"ec_transfer_config": object()},
        {"is_encoder_decoder": True},
        {"scheduler_cls": "some.Scheduler"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_where_more_could_go_wrong_nothing_is_dropped(changes):
    config = vllm_config(**changes)
    assert release_from_requests(config, {}) is None
    assert release_from_encoder_cache(config, EncoderCache()) is None
    request = SimpleNamespace(
        request_id="a", mm_features=[item(0, 10)], num_computed_tokens=0
    )
    cached = CachedRequestData.make_empty()
    resend_mm_features(config, cached, [request])
    assert vars(cached) == vars(CachedRequestData.make_empty())


@st.composite
def prompts(draw):
    """Spans of items, by offset, that may overlap, and the length of the prompt."""
    spans = []
    offset = 0
    for _ in range(draw(st.integers(1, 5))):
        offset += draw(st.integers(0, 6))
        spans.append((offset, draw(st.integers(1, 12))))
        if not draw(st.booleans()):
            offset = sum(spans[-1])
    return spans, max(map(sum, spans)) + draw(st.integers(1, 4))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(data=st.data(), prompt=prompts(), version=st.sampled_from([WorkerV1, WorkerV2]))
def test_what_the_scheduler_may_have_encoded_is_there(data, prompt, version):
    """Any chunks, look-ahead and preemptions, with the scheduler's own search."""
    spans, n_prompt = prompt
    lookahead = data.draw(st.integers(0, 2))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(mm_input_release, "_MIN_BYTES", 1)
        worker = version()
        request = SimpleNamespace(
            request_id="a",
            mm_features=[item(*span, nbytes=1) for span in spans],
            num_computed_tokens=0,
        )
        output = step([new_request("a", request.mm_features)])
        preemptions = 0
        while request.num_computed_tokens < n_prompt + 3:
            worker.run(output)
            n = data.draw(st.integers(1, 16))
            start = request.num_computed_tokens
            lo, hi = get_mm_features_in_window(
                request.mm_features, start=start, end=start + n + lookahead
            )
            assert all(has_data(worker)[lo:hi])
            request.num_computed_tokens += n
            output = step(computed={"a": request.num_computed_tokens})
            if preemptions < 3 and data.draw(st.booleans()):
                preemptions += 1
                request.num_computed_tokens = data.draw(st.integers(0, start))
                output = worker.resume(request)
        worker.run(output)
        assert not any(has_data(worker))


# ---- The hooks --------------------------------------------------------------


def make_scheduler(folder: Path, flag: bool) -> Scheduler:
    """For a model runner V1. Of text alone: what is resent is tested above."""
    OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(folder)
    n_blocks, block_size, max_model_len = 16, 16, 64
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            str(folder), skip_tokenizer_init=True, max_model_len=max_model_len
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=max_model_len, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=block_size),
        parallel_config=ParallelConfig(enable_shm_tensor_arena=flag),
    )
    vllm_config.cache_config.num_gpu_blocks = n_blocks
    register_all_kvcache_specs(vllm_config)
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kv_cache_config = KVCacheConfig(n_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    scheduler = Scheduler(
        vllm_config, kv_cache_config, MagicMock(), block_size=block_size
    )
    scheduler.use_v2_model_runner = False
    return scheduler


@pytest.mark.parametrize("flag", [False, True])
def test_the_scheduler_resends_what_resumes(flag: bool, tmp_path, monkeypatch):
    scheduler = make_scheduler(tmp_path, flag)
    resend = Mock()
    monkeypatch.setattr(mm_input_release, "resend_mm_features", resend)
    request = Request("a", [1] * 10, SamplingParams(max_tokens=4), None)
    scheduler.add_request(request)
    scheduler.schedule()
    assert not resend.called
    scheduler.reset_prefix_cache(reset_running_requests=True)
    cached = scheduler.schedule().scheduled_cached_reqs
    assert cached.resumed_req_ids == {"a"}
    calls = [call.args for call in resend.call_args_list]
    assert calls == [(scheduler.vllm_config, cached, [request])] * flag


def test_a_model_runner_v1_drops_when_it_knows_the_requests(monkeypatch):
    from vllm.v1.worker import gpu_model_runner

    monkeypatch.setattr(gpu_model_runner, "get_pp_group", MagicMock())
    runner = MagicMock(
        requests={}, is_pooling_model=False, uses_mrope=False, speculative_config=None
    )
    known = []
    runner.mm_input_release.on_step = lambda _: known.extend(runner.requests)
    output = step([new_request("a", [item(0, 10)])])
    gpu_model_runner.GPUModelRunner._update_states(runner, output)
    assert known == ["a"]


def test_a_model_runner_v2_drops_when_it_knows_the_requests():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner = MagicMock()
    GPUModelRunner.execute_model(runner, step())
    calls = [call[0] for call in runner.method_calls]
    assert calls.index("add_requests") < calls.index("update_requests")

    runner = MagicMock()
    states = runner.req_states
    states.num_computed_tokens_np = np.zeros(1, np.int32)
    states.prefill_len.np = np.zeros(1, np.int32)
    states.num_computed_prefill_tokens = np.zeros(1, np.int32)
    output = step()
    GPUModelRunner.update_requests(runner, output)
    runner.mm_input_release.on_step.assert_called_once_with(output)
