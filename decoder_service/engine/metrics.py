"""What operators see of the engine: how full it is, how fast it goes, how long requests wait for it."""

from prometheus_client import Counter, Gauge, Histogram

from decoder_service.engine.engine import EngineStats
from decoder_service.engine.scheduler import Step

_SHORT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_LONG_SECONDS = (*_SHORT_SECONDS, 20, 50, 100)

REQUESTS_RUNNING = Gauge("lenspair_decoder_requests_running", "Requests in the batch.")
REQUESTS_WAITING = Gauge("lenspair_decoder_requests_waiting", "Requests that wait for a place.")
PREEMPTIONS = Counter(
    "lenspair_decoder_preemptions_total", "Times that a request gave up its blocks, to be computed again."
)
OUT_OF_MEMORY = Counter(
    "lenspair_decoder_out_of_memory_total", "Steps for which the device had too little memory."
)
REUSED_TOKENS = Counter(
    "lenspair_decoder_reused_tokens_total", "Prompt tokens that were in the KV cache already."
)
KV_BLOCKS_USED = Gauge("lenspair_decoder_kv_blocks_used", "Blocks of the KV cache that are lent.")
KV_BLOCKS_CACHED = Gauge(
    "lenspair_decoder_kv_blocks_cached",
    "Blocks of the KV cache that nobody has, with contents that are known.",
)
KV_BLOCKS_EVICTED = Counter(
    "lenspair_decoder_kv_blocks_evicted_total", "Blocks whose contents were given up for others."
)
KV_BLOCKS_TOTAL = Gauge("lenspair_decoder_kv_blocks_total", "Blocks of the KV cache.")
ABANDONED = Counter(
    "lenspair_decoder_abandoned_total", "Requests that left before their answer was complete."
)
BATCH_SIZE = Histogram(
    "lenspair_decoder_batch_size",
    "Requests in one step.",
    ["mode"],
    buckets=(1, 2, 4, 8, 12, 16, 24, 32, 64, 128),
)
STEP_SECONDS = Histogram(
    "lenspair_decoder_step_seconds", "Time of one step of the model.", ["mode"], buckets=_SHORT_SECONDS
)
TOKENS = Counter("lenspair_decoder_tokens_total", "Tokens computed, by kind of work.", ["kind"])
TIME_TO_FIRST_TOKEN = Histogram(
    "lenspair_decoder_time_to_first_token_seconds",
    "From the submission of a request to its first token.",
    ["mode"],
    buckets=_LONG_SECONDS,
)
INTER_TOKEN_LATENCY = Histogram(
    "lenspair_decoder_inter_token_latency_seconds",
    "Between two tokens of one request.",
    ["mode"],
    buckets=_SHORT_SECONDS,
)
QUEUE_TIME = Histogram(
    "lenspair_decoder_request_queue_time_seconds",
    "From the submission of a request to the first step that works on it.",
    ["mode"],
    buckets=_LONG_SECONDS,
)


def observe_step(step: Step, seconds: float, mode: str) -> None:
    """Books one step of the model."""
    BATCH_SIZE.labels(mode).observe(len(step.chunks))
    STEP_SECONDS.labels(mode).observe(seconds)
    decoded = sum(chunk.is_decode for chunk in step.chunks)
    TOKENS.labels("decode").inc(decoded)
    TOKENS.labels("prefill").inc(step.num_tokens - decoded)


def observe_stats(stats: EngineStats, before: EngineStats) -> None:
    """Shows how full the engine is, and counts what has happened since `before`."""
    REQUESTS_RUNNING.set(stats.running)
    REQUESTS_WAITING.set(stats.waiting)
    KV_BLOCKS_USED.set(stats.kv_blocks_used)
    KV_BLOCKS_CACHED.set(stats.kv_blocks_cached)
    KV_BLOCKS_TOTAL.set(stats.kv_blocks_total)
    PREEMPTIONS.inc(stats.preempted - before.preempted)
    KV_BLOCKS_EVICTED.inc(stats.evicted - before.evicted)
