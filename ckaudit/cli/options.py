"""Options that several commands share, so that they are spelt and explained the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class FailOn(StrEnum):
    """The mildest severity that makes the exit code 1."""

    error = "error"
    warning = "warning"
    note = "note"
    never = "never"


TargetArg = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="org/name[@revision] on the Hub, a folder, a .safetensors file or an index file."
    ),
]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        "-e",
        metavar="SPEC",
        help="Who would load it: transformers, vllm==X, vllm@PATH, vllm, rules:vllm==X, rules:FILE.toml. Repeatable. "
        "[default: transformers, and rules for the newest vLLM that a rule book knows]",
    ),
]
Jobs = Annotated[int, typer.Option(min=1, help="Requests to the Hub at once.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let engines run the repo's own Python code.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Use what is on this machine; no network.")]
ClassName = Annotated[
    str | None, typer.Option("--class", metavar="NAME", help="Load as this model class, not the one in config.json.")
]
Device = Annotated[str, typer.Option(help="Device that the load is meant for.")]
Budget = Annotated[float, typer.Option(min=1.0, help="Seconds for one engine on one checkpoint.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Neither use nor keep results of earlier runs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
