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
from demo.pair import Pair, free_port

RESULTS = Path(__file__).parent / "results" / "faults.json"
NUM_QUESTIONS = 36
CALM_SECONDS = 4.0
# The four services and the callers share what cores there are.
ENVIRONMENT = {"LENSPAIR_TORCH_THREADS": "1", "LENSPAIR_STORE_TIMEOUT_SECONDS": "1"}
# The names are known before a store under Sentinel runs.
FAILOVER_NAMES = ("store-switched", "store-failed-over")


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


def start_pair(stack: ExitStack, store_url: str = "") -> Pair:
    """Two encoders, two decoders and, without a URL, a store that can be restarted."""
    pair = Pair(
        environment=ENVIRONMENT,
        store_port=free_port(),
        store_url=store_url,
        num_encoders=2,
        num_decoders=2,
    )
    return stack.enter_context(pair)


def main() -> int:
    arguments = _arguments()
    wanted: Sequence[str] = arguments.only or _names()
    records, windows = [], []
    for is_sentinel in (False, True):
        names = [name for name in wanted if (name in FAILOVER_NAMES) == is_sentinel]
        if names:
            more = _run_some(names, 0.0 if is_sentinel else arguments.seconds, is_sentinel=is_sentinel)
            records += more[0]
            windows += more[1]
    print(fault_report.table(records, windows))
    if not arguments.only:
        fault_report.write(RESULTS, records, windows)
    found = fault_report.problems(records, windows)
    print("\n".join(found) if found else "no request was lost, no answer was wrong")
    return 1 if found else 0


def _run_some(
    names: Sequence[str], seconds: float, *, is_sentinel: bool
) -> tuple[list[Record], list[Window]]:
    with ExitStack() as stack:
        print("starting two encoders and two decoders ...", flush=True)
        if is_sentinel:
            servers = stack.enter_context(fault_failover.start())
            faults = fault_failover.faults(servers)
            pair = start_pair(stack, servers.url)
        else:
            faults = fault_kinds.FAULTS
            pair = start_pair(stack)
        return run(pair, _in_turn([fault for fault in faults if fault.name in names], seconds))


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
    failover = FAILOVER_NAMES if fault_failover.can_start() else ()
    return [*(fault.name for fault in fault_kinds.FAULTS), *failover]


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
        "--only", action="append", choices=_names(), metavar="FAULT", help="one of: %(choices)s; repeatable"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
