"""`python -m decoder_service`: reads the settings and runs the decoder."""

import os
import sys

from decoder_service.settings import DecoderSettings
from shared.settings_help import parse_arguments


def main() -> int:
    settings = parse_arguments(
        "python -m decoder_service",
        "Lenspair's decoder: turns of text and feature keys in, text out.",
        DecoderSettings,
    )
    # OpenMP reads this once, when torch is imported, and so the import comes after it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from decoder_service.app import run  # noqa: PLC0415

    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
