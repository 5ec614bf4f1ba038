"""Catch what loads but computes wrongly: perplexity on a small multimodal set, compared with a reference.

`data` (rows and their hash) -> `encode` (token ids and which of them are scored) -> `score` (a model) or `server` (a running
engine) -> `compare` (relative difference, noise, which rows moved) -> `run` (the whole, as the command line calls it).
`references` keeps results in a file, `journal` lets an interrupted run go on, `faults` plants faults to prove that the check sees them.
The definition of the number is in `docs/perplexity.md`.
"""
