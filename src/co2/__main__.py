"""`python -m co2`: the command line."""

import sys

from co2.cli import main

sys.exit(main())
