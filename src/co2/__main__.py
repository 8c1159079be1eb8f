"""`python -m co2`: the command line."""

from co2.cli import main

main()
