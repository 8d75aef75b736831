"""What operators see of the engine: how full it is, how fast it goes, how long requests wait for it."""

from prometheus_client import Counter, Gauge, Histogram

from decoder_service.engine.engine import EngineStats
from decoder_service.engine.scheduler import Step

_SHORT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_LONG_SECONDS = (*_SHORT_SECONDS, 20, 50, 100)

REQUESTS_RUNNING = Gauge("lenspair_decoder_requests_running", "Requests in the batch.")
REQUESTS_WAITING = Gauge("lenspair_decoder_requests_waiting", "Requests that wait for a place.")
KV_BLOCKS_USED = Gauge("lenspair_decoder_kv_blocks_used", "Blocks of the KV cache that are lent.")
KV_BLOCKS_TOTAL = Gauge("lenspair_decoder_kv_blocks_total", "Blocks of the KV cache.")
ABANDONED = Counter(
    "lenspair_decoder_abandoned_total", "Requests that left before their answer was complete."
)
BATCH_SIZE = Histogram(
    "lenspair_decoder_batch_size", "Requests in one step.", buckets=(1, 2, 4, 8, 12, 16, 24, 32, 64, 128)
)
STEP_SECONDS = Histogram(
    "lenspair_decoder_step_seconds", "Time of one step of the model.", buckets=_SHORT_SECONDS
)
TOKENS = Counter("lenspair_decoder_tokens_total", "Tokens computed, by kind of work.", ["kind"])
TIME_TO_FIRST_TOKEN = Histogram(
    "lenspair_decoder_time_to_first_token_seconds",
    "From the submission of a request to its first token.",
    buckets=_LONG_SECONDS,
)
INTER_TOKEN_LATENCY = Histogram(
    "lenspair_decoder_inter_token_latency_seconds",
    "Between two tokens of one request.",
    buckets=_SHORT_SECONDS,
)
QUEUE_TIME = Histogram(
    "lenspair_decoder_request_queue_time_seconds",
    "From the submission of a request to the first step that works on it.",
    buckets=_LONG_SECONDS,
)


def observe_step(step: Step, seconds: float) -> None:
    """Books one step of the model."""
    BATCH_SIZE.observe(len(step.chunks))
    STEP_SECONDS.observe(seconds)
    decoded = sum(chunk.is_decode for chunk in step.chunks)
    TOKENS.labels("decode").inc(decoded)
    TOKENS.labels("prefill").inc(step.num_tokens - decoded)


def observe_stats(stats: EngineStats) -> None:
    """Shows how full the engine is."""
    REQUESTS_RUNNING.set(stats.running)
    REQUESTS_WAITING.set(stats.waiting)
    KV_BLOCKS_USED.set(stats.kv_blocks_used)
    KV_BLOCKS_TOTAL.set(stats.kv_blocks_total)
