"""``python -m kvxfer`` is the ``kvxfer`` command."""

from kvxfer.cli import main

main()
