"""Runs the pair on fixed local ports until Ctrl-C: `make up`."""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from demo.pair import DEMO_CHECKPOINT, Pair, PairError

ENCODER_PORT = 50051
DECODER_PORT = 50052
WATCH_SECONDS = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a store, an encoder and a decoder on this machine.")
    parser.add_argument("--checkpoint", default=str(DEMO_CHECKPOINT), help="directory or hub id")
    parser.add_argument("--encoder-port", type=int, default=ENCODER_PORT, help="default: %(default)s")
    parser.add_argument("--decoder-port", type=int, default=DECODER_PORT, help="default: %(default)s")
    arguments = parser.parse_args()
    stop = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.set())
    environment = {"LENSPAIR_REFLECTION": "true", "LENSPAIR_LOG_FORMAT": "console"}
    print(f"starting the pair on {arguments.checkpoint} ...", flush=True)
    try:
        with Pair(
            arguments.checkpoint,
            environment=environment,
            encoder_port=arguments.encoder_port,
            decoder_port=arguments.decoder_port,
        ) as pair:
            _greet(pair)
            return _watch(pair, stop)
    except PairError as error:
        print(error, file=sys.stderr)
        return 1


def _greet(pair: Pair) -> None:
    picture = next(iter(sorted((Path(__file__).parent / "samples").glob("*.png"))), Path("picture.png"))
    print(f"encoder  {pair.encoder.address}   log {pair.encoder.log}")
    print(f"decoder  {pair.decoder.address}   log {pair.decoder.log}")
    print("ready. In another terminal:")
    print(f'  make ask IMAGE={os.path.relpath(picture)} Q="What colour is the shape?"')
    print("Ctrl-C ends it.", flush=True)


def _watch(pair: Pair, stop: threading.Event) -> int:
    while not stop.wait(WATCH_SECONDS):
        for service in (pair.encoder, pair.decoder):
            if not service.is_running():
                print(f"the {service.name} ended:\n{service.log_end()}", file=sys.stderr)
                return 1
    print("stopping ...", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
