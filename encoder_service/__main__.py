"""`python -m encoder_service`: reads the settings and runs the encoder."""

import sys

from encoder_service.settings import EncoderSettings
from shared.cpu import let_threads_sleep
from shared.settings_help import parse_arguments


def main() -> int:
    settings = parse_arguments(
        "python -m encoder_service",
        "Lenspair's encoder: pictures in, references to their vision features out.",
        EncoderSettings,
    )
    # Before torch is imported: OpenMP reads its settings once.
    let_threads_sleep()
    from encoder_service.app import run  # noqa: PLC0415

    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
