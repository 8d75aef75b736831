"""Starts the pair, asks about the sample pictures twice, and checks the answers: `make demo`."""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from demo.pair import Pair, PairError
from lenspair_client import Answer, LenspairClient, LenspairClientError, Outcome

SAMPLES = Path(__file__).parent / "samples"


@dataclass(frozen=True, slots=True)
class Sample:
    """A question about some sample pictures, and the answer that is true."""

    files: tuple[str, ...]
    question: str
    answer: str


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Start a store, an encoder and a decoder; ask each question about the sample pictures "
        "twice; check that the answers are right and the second time needed no encoding.",
    )
    parser.parse_args()
    started = time.monotonic()
    print("starting a store, the encoder and the decoder ...", flush=True)
    try:
        with Pair() as pair, LenspairClient(pair.encoder.address, pair.decoder.address) as client:
            print(f"ready after {time.monotonic() - started:.1f} s\n", flush=True)
            outcomes = [_ask_twice(client, sample) for sample in read_samples()]
    except (PairError, LenspairClientError) as error:
        print(error, file=sys.stderr)
        return 1
    failed = outcomes.count(False)
    print(
        f"\n{len(outcomes) - failed} of {len(outcomes)} questions answered rightly, and again from the store"
    )
    return 1 if failed else 0


def read_samples() -> list[Sample]:
    """The questions of demo/samples/questions.json."""
    entries = json.loads((SAMPLES / "questions.json").read_text())
    return [Sample(tuple(entry["files"]), entry["question"], entry["answer"]) for entry in entries]


def _ask_twice(client: LenspairClient, sample: Sample) -> bool:
    images = [SAMPLES / name for name in sample.files]
    first, again = (client.ask(sample.question, images) for _ in range(2))
    is_right = first.text.strip() == again.text.strip() == sample.answer
    is_hit = all(outcome is Outcome.HIT for outcome in again.outcomes)
    print(f"{', '.join(sample.files) or '(no picture)'}: {sample.question}")
    print(f"  answer    {first.text.strip()}")
    print(f"  expected  {sample.answer}   {'right' if is_right else 'WRONG'}")
    print(f"  first ask {_how(first)}; again {_how(again)}{'' if is_hit else '   NOT A HIT'}", flush=True)
    return is_right and is_hit


def _how(answer: Answer) -> str:
    return " ".join(
        [f"{answer.total_seconds * 1e3:.0f} ms", ", ".join(dict.fromkeys(answer.outcomes))]
    ).strip()


if __name__ == "__main__":
    sys.exit(main())
