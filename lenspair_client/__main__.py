"""`python -m lenspair_client` is the `lenspair` command."""

import sys

from lenspair_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
