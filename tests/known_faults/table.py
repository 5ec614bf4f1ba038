"""The whole table."""

from tests.known_faults import elsewhere, files, layers, names, quantised, weights

FAULTS = (*quantised.FAULTS, *files.FAULTS, *layers.FAULTS, *names.FAULTS, *weights.FAULTS)
ELSEWHERE = elsewhere.ELSEWHERE
