"""`python -m twinkle` is the `twinkle` command."""

import sys

from twinkle.cli.main import main

sys.exit(main())
