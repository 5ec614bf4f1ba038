"""Faults of checkpoints that were reported in public, each reduced to names, sizes, config and what the engine did with them.

A row is a report: what was seen, in one sentence, where, the smallest case that shows it, and what ckaudit must say of it. Names are as
the reports or their fixes give them, with the layers cut to a few. Reports of false alarms are rows that expect nothing. What headers
cannot tell is a row too, with the reason and with what can tell it (`elsewhere.py`).
"""
