"""`python -m encoder_service`: reads the settings and runs the encoder."""

import os
import sys

from encoder_service.settings import EncoderSettings
from shared.settings_help import parse_arguments


def main() -> int:
    settings = parse_arguments(
        "python -m encoder_service",
        "Lenspair's encoder: pictures in, references to their vision features out.",
        EncoderSettings,
    )
    # Spinning threads of two torch processes on the same cores slow one another sixtyfold. OpenMP reads
    # this once, when torch is imported, and so the import comes after it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from encoder_service.app import run  # noqa: PLC0415

    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
