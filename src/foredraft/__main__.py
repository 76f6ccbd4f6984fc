"""`python -m foredraft` is the command line."""

from foredraft.cli import main

main()
