"""`python -m decoder_service`: reads the settings and runs the decoder."""

import sys

from decoder_service.settings import DecoderSettings
from shared.cpu import let_threads_sleep
from shared.settings_help import parse_arguments


def main() -> int:
    settings = parse_arguments(
        "python -m decoder_service",
        "Lenspair's decoder: turns of text and feature keys in, text out.",
        DecoderSettings,
    )
    # Before torch is imported: OpenMP reads its settings once.
    let_threads_sleep()
    from decoder_service.app import run  # noqa: PLC0415

    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
