"""`python -m ckaudit`."""

from ckaudit.cli import main

main()
