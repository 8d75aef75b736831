"""Steady load on two encoders and two decoders while each fault happens in turn: `make test-faults`.

No request may be lost (an error that its caller sees) and no answer may be wrong: in text, or in the pieces
of a stream. Answers are known from a calm pass through the same pair. Fails when one is lost or wrong.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from bench import fault_failover, fault_kinds, fault_report
from bench.fault_kinds import Fault
from bench.fault_load import Load, Record, learn_answers
from bench.fault_questions import questions
from bench.fault_report import Window
from demo.pair import Pair
from demo.ports import free_port
from demo.sentinel_store import SentinelStore

RESULTS = Path(__file__).parent / "results" / "faults.json"
NUM_QUESTIONS = 36
CALM_SECONDS = 4.0
# The four services and the callers share what cores there are.
ENVIRONMENT = {"LENSPAIR_TORCH_THREADS": "1", "LENSPAIR_STORE_TIMEOUT_SECONDS": "1"}


def run(
    pair: Pair, faults: Iterable[Fault], *, callers: int = 6, num_questions: int = NUM_QUESTIONS
) -> tuple[list[Record], list[Window]]:
    """Injects faults into a running pair under load; what became of the requests, and when faults came."""
    known = learn_answers(pair.encoder_target, pair.decoder_target, questions(num_questions, seed=7))
    windows = []
    with Load(pair.encoder_target, pair.decoder_target, known, callers=callers) as load:
        time.sleep(CALM_SECONDS)
        for fault in faults:
            began = time.monotonic()
            fault.inject(pair)
            windows.append(Window(fault.name, began, time.monotonic()))
            time.sleep(CALM_SECONDS)
            load.check()
    return load.records, windows


def start_pair(stack: ExitStack, store_url: str = "", *, hand_over: bool = False) -> Pair:
    """Two encoders, two decoders and, without a URL, a store that can be restarted."""
    pair = Pair(
        environment=ENVIRONMENT,
        store_port=free_port(),
        store_url=store_url,
        num_encoders=2,
        num_decoders=2,
        hand_over=hand_over,
    )
    return stack.enter_context(pair)


def main() -> int:
    arguments = _arguments()
    records, windows = [], []
    for some_run in (_run_with_own_store, _run_under_sentinel):
        more_records, more_windows = some_run(arguments)
        records += more_records
        windows += more_windows
    print(fault_report.table(records, windows))
    if not (arguments.only or arguments.hand_over):
        fault_report.write(RESULTS, records, windows)
    found = fault_report.problems(records, windows)
    print("\n".join(found) if found else "no request was lost, no answer was wrong")
    return 1 if found else 0


def _run_with_own_store(arguments: argparse.Namespace) -> tuple[list[Record], list[Window]]:
    chosen = [fault for fault in fault_kinds.FAULTS if fault.name in arguments.only]
    if not chosen and arguments.only:
        return [], []
    print("starting two encoders and two decoders ...", flush=True)
    with ExitStack() as stack:
        pair = start_pair(stack, hand_over=arguments.hand_over)
        return run(pair, _in_turn(chosen or fault_kinds.FAULTS, arguments.seconds))


def _run_under_sentinel(arguments: argparse.Namespace) -> tuple[list[Record], list[Window]]:
    """Once only: a master that has died has no other successor."""
    if arguments.only and not set(arguments.only) & set(fault_failover.NAMES):
        return [], []
    print("starting two encoders and two decoders on a store under Sentinel ...", flush=True)
    with ExitStack() as stack:
        servers = stack.enter_context(SentinelStore())
        faults = fault_failover.faults(servers)
        chosen = [fault for fault in faults if fault.name in arguments.only]
        pair = start_pair(stack, servers.url, hand_over=arguments.hand_over)
        return run(pair, _in_turn(chosen or faults, 0))


def _in_turn(faults: Sequence[Fault], seconds: float) -> Iterator[Fault]:
    """Each fault once, and again from the first on while there is time."""
    end = time.monotonic() + seconds
    with tqdm(total=len(faults), desc="faults", leave=False, disable=None) as bar:
        is_first_round = True
        while is_first_round or time.monotonic() < end:
            for fault in faults:
                if is_first_round or time.monotonic() < end:
                    bar.set_postfix_str(fault.name)
                    yield fault
                    bar.update(is_first_round)
            is_first_round = False


def _names() -> list[str]:
    return [*(fault.name for fault in fault_kinds.FAULTS), *fault_failover.NAMES]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="go through the faults again until so much time has passed (default: each once, some minutes)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=_names(),
        metavar="FAULT",
        help="one of: %(choices)s; repeatable",
    )
    parser.add_argument(
        "--hand-over",
        action="store_true",
        help="encoders keep what the store does not take, and decoders fetch it from them",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
