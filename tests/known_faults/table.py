"""The whole table."""

from tests.known_faults import adapters, elsewhere, files, layers, names, pairs, quantised, weights

FAULTS = (
    *quantised.FAULTS,
    *files.FAULTS,
    *layers.FAULTS,
    *names.FAULTS,
    *weights.FAULTS,
    *adapters.FAULTS,
    *pairs.FAULTS,
)
ELSEWHERE = elsewhere.ELSEWHERE
