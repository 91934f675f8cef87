"""Writes 20 MB to stderr, then fails with the reason at the end."""

import sys

for _ in range(200_000):
    sys.stderr.write("x" * 99 + "\n")
sys.exit("the reason")
