# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the arena's statistics become in the front end: metrics and a log entry.

Imports nothing of the arena: the front end has none.
"""

from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from vllm.distributed.device_communicators.shm_arena.stats import DeclineReason
from vllm.v1.metrics.utils import create_metric_per_engine

# 200 MiB take 4.5 ms with 16 threads and 34 to 43 ms with one, 190 ms into
# pages that are not there yet.
_COPY_SECONDS_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
)


class ShmTensorArenaLogging:
    """The arena's part of the periodic log line. Called by `LoggingStatLogger`."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._tensors = 0
        self._bytes = 0
        self._declined = 0

    def observe(self, stats: dict[str, Any]) -> None:
        """Add one engine's counts to those of the current interval."""
        self._tensors += stats["tensors"]
        self._bytes += stats["bytes"]
        self._declined += sum(stats["declined"].values())

    def extend(self, log_parts: list[str], log_args: list[int | float | str]) -> None:
        """Append what the arena did since the last call, if anything."""
        if self._tensors or self._declined:
            log_parts.append("Shm tensor arena: %d tensors (%.1f MiB), %d declined")
            log_args.extend([self._tensors, self._bytes / (1 << 20), self._declined])
        self._reset()


class ShmTensorArenaProm:
    """The arena's Prometheus metrics. Made by `PrometheusStatLogger`, with its
    metric classes, for every engine that it serves.

    The share of the large bytes that took the arena is

      rate(vllm:shm_tensor_arena_bytes_total[$interval]) /
      (rate(vllm:shm_tensor_arena_bytes_total[$interval]) +
       sum without (reason)
         (rate(vllm:shm_tensor_arena_declined_bytes_total[$interval])))
    """

    def __init__(
        self,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        gauge_cls: type[Gauge],
        counter_cls: type[Counter],
        histogram_cls: type[Histogram],
    ):
        # Named in full, so that the documentation's list of metrics finds them.
        self._gauge_cls = gauge_cls
        self._counter_cls = counter_cls
        self._histogram_cls = histogram_cls
        self._per_engine_labelvalues = per_engine_labelvalues

        def per_engine(metric: Any) -> dict[int, Any]:
            return create_metric_per_engine(metric, per_engine_labelvalues)

        def per_engine_and_reason(metric: Any) -> dict[int, dict[str, Any]]:
            return {
                idx: {
                    reason.value: metric.labels(*labelvalues, reason.value)
                    for reason in DeclineReason
                }
                for idx, labelvalues in per_engine_labelvalues.items()
            }

        # Keyed as the values in `ShmTensorArena.take_stats`.
        self._counters = {
            "tensors": per_engine(
                self._counter_cls(
                    name="vllm:shm_tensor_arena_tensors",
                    documentation="Tensors sent to the workers through the arena.",
                    labelnames=labelnames,
                )
            ),
            "bytes": per_engine(
                self._counter_cls(
                    name="vllm:shm_tensor_arena_bytes",
                    documentation="Bytes sent to the workers through the arena.",
                    labelnames=labelnames,
                )
            ),
        }
        self._counters_by_reason = {
            "declined": per_engine_and_reason(
                self._counter_cls(
                    name="vllm:shm_tensor_arena_declined",
                    documentation=(
                        "Tensors of 8 MiB and more that took the out-of-band path. "
                        "Reason labels: 'too_large' = larger than the arena; 'no_room' "
                        "= no run of free slots is long enough; 'no_space' = no memory "
                        "in /dev/shm or under the cgroup's limit; 'not_attached' = not "
                        "every worker has opened the arena; 'not_eligible' = not a "
                        "contiguous CPU tensor."
                    ),
                    labelnames=labelnames + ["reason"],
                )
            ),
            "declined_bytes": per_engine_and_reason(
                self._counter_cls(
                    name="vllm:shm_tensor_arena_declined_bytes",
                    documentation=(
                        "Bytes of the tensors in vllm:shm_tensor_arena_declined."
                    ),
                    labelnames=labelnames + ["reason"],
                )
            ),
        }
        self._gauges = {
            "capacity_bytes": per_engine(
                self._gauge_cls(
                    name="vllm:shm_tensor_arena_capacity_bytes",
                    documentation="Bytes that the arena can hold.",
                    multiprocess_mode="mostrecent",
                    labelnames=labelnames,
                )
            ),
            "prepared_bytes": per_engine(
                self._gauge_cls(
                    name="vllm:shm_tensor_arena_prepared_bytes",
                    documentation="Bytes made resident ahead of use.",
                    multiprocess_mode="mostrecent",
                    labelnames=labelnames,
                )
            ),
            "slots_in_use": per_engine(
                self._gauge_cls(
                    name="vllm:shm_tensor_arena_slots_in_use",
                    documentation="Slots held by requests.",
                    multiprocess_mode="mostrecent",
                    labelnames=labelnames,
                )
            ),
            "bytes_in_use": per_engine(
                self._gauge_cls(
                    name="vllm:shm_tensor_arena_bytes_in_use",
                    documentation="Bytes of the slots in use.",
                    multiprocess_mode="mostrecent",
                    labelnames=labelnames,
                )
            ),
            "peak_bytes": per_engine(
                self._gauge_cls(
                    name="vllm:shm_tensor_arena_peak_bytes",
                    documentation="Most bytes in use at a time since the start.",
                    multiprocess_mode="mostrecent",
                    labelnames=labelnames,
                )
            ),
            "largest_free_bytes": per_engine(
                self._gauge_cls(
                    name="vllm:shm_tensor_arena_largest_free_bytes",
                    documentation=(
                        "Bytes of the longest run of free slots: a larger tensor is "
                        "declined."
                    ),
                    multiprocess_mode="mostrecent",
                    labelnames=labelnames,
                )
            ),
            "oldest_slot_age_seconds": per_engine(
                self._gauge_cls(
                    name="vllm:shm_tensor_arena_oldest_slot_age_seconds",
                    documentation=(
                        "Age of the tensor that has been held longest; 0 if there is "
                        "none."
                    ),
                    multiprocess_mode="mostrecent",
                    labelnames=labelnames,
                )
            ),
        }
        self._copy_seconds = per_engine(
            self._histogram_cls(
                name="vllm:shm_tensor_arena_copy_seconds",
                documentation=(
                    "Time in seconds for which copying a tensor into the arena held "
                    "the engine's thread."
                ),
                buckets=list(_COPY_SECONDS_BUCKETS),
                labelnames=labelnames,
            )
        )
        # Their children are made when the readers are known: a worker that has
        # not been heard of is not one that has not attached.
        self._gauges_by_reader = {
            "reader_attached": self._gauge_cls(
                name="vllm:shm_tensor_arena_reader_attached",
                documentation="1 if the worker has opened the arena.",
                multiprocess_mode="mostrecent",
                labelnames=labelnames + ["reader"],
            ),
            "reader_pinned_bytes": self._gauge_cls(
                name="vllm:shm_tensor_arena_reader_pinned_bytes",
                documentation="Bytes that the worker has pinned for its device.",
                multiprocess_mode="mostrecent",
                labelnames=labelnames + ["reader"],
            ),
        }

    def observe(self, stats: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what `ShmTensorArena.take_stats` gave."""
        for key, counters in self._counters.items():
            counters[engine_idx].inc(stats[key])
        for key, by_reason in self._counters_by_reason.items():
            for reason, count in stats[key].items():
                by_reason[engine_idx][reason].inc(count)
        for key, gauges in self._gauges.items():
            gauges[engine_idx].set(stats[key])
        for seconds in stats["copy_seconds"]:
            self._copy_seconds[engine_idx].observe(seconds)
        labelvalues = self._per_engine_labelvalues[engine_idx]
        for key, metric in self._gauges_by_reader.items():
            for reader, value in enumerate(stats[key]):
                metric.labels(*labelvalues, str(reader)).set(value)
