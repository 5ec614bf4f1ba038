"""Options that several commands share, so that they are spelt and explained the same everywhere."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from ckaudit.errors import UsageError


class FailOn(StrEnum):
    """The mildest severity that makes the exit code 1."""

    error = "error"
    warning = "warning"
    note = "note"
    never = "never"


ExitFrom = Annotated[FailOn, typer.Option(help="Exit 1 from this severity on.")]
AllowNotJudged = Annotated[
    bool, typer.Option("--allow-not-judged", help="Exit 0, not 3, when something asked for could not be judged.")
]
Json = Annotated[
    str | None,
    typer.Option(metavar="FILE|-", help="Write the report as JSON to FILE; - writes it to stdout instead of the text."),
]
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
        help="Who would load it: transformers, vllm==X, 'vllm>=X', vllm@PATH, vllm, rules:vllm==X, rules:FILE.toml. Repeatable. "
        "[default: transformers, and rules for the newest vLLM that a rule book knows]",
    ),
]
Jobs = Annotated[int, typer.Option(min=1, help="Requests to the Hub at once.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let engines run the repo's own Python code.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Use what is on this machine; no network.")]
ClassName = Annotated[
    str | None,
    typer.Option("--class", metavar="NAME", help="transformers: load as this class, not the one in config.json."),
]
Device = Annotated[str, typer.Option(help="transformers: the device that the load is meant for.")]
Budget = Annotated[float, typer.Option(min=1.0, help="Seconds for one engine on one checkpoint.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Neither use nor keep results of earlier runs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

TensorParallel = Annotated[
    str | None, typer.Option("--tp", metavar="N,N", help="vLLM: also load over so many ranks, such as 2,4,8.")
]
PipelineParallel = Annotated[int | None, typer.Option("--pp", min=1, help="vLLM: pipeline-parallel size.")]
ExpertParallel = Annotated[bool, typer.Option("--ep", help="vLLM: spread experts over the ranks.")]
Quantization = Annotated[str | None, typer.Option(metavar="NAME", help="vLLM: its option of that name.")]
HfOverrides = Annotated[
    str | None, typer.Option(metavar="JSON", help="vLLM: changes to config.json, as a JSON object.")
]
LoadFormat = Annotated[str | None, typer.Option(metavar="NAME", help="vLLM: its option of that name.")]
Platform = Annotated[
    str | None, typer.Option(metavar="NAME", help="vLLM: the machine to pretend. [default: CUDA, sm90]")
]


def sizes(text: str | None, *, spread: bool = False) -> tuple[int, ...]:
    """`1,2,4` as sizes; 1 is left out unless the model is `spread` over ranks otherwise: alone it is always loaded. Raises UsageError."""
    if text is None:
        return ()
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UsageError(f"--tp {text} is no list of sizes.", "Write them as 2,4,8.")
    return tuple(sorted(set(found) - (set() if spread else {1})))


def serving(
    *,
    pp: int | None,
    ep: bool,
    quantization: str | None,
    hf_overrides: str | None,
    load_format: str | None,
    platform: str | None,
) -> dict[str, Any]:
    """vLLM's serving options under its own names, those alone that were given. Raises UsageError."""
    overrides: Any = None
    if hf_overrides is not None:
        try:
            overrides = json.loads(hf_overrides)
        except ValueError as error:
            raise UsageError(f"--hf-overrides is not JSON: {error}.", """Write it as '{"key": value}'.""") from None
        if not isinstance(overrides, dict):
            raise UsageError("--hf-overrides is no JSON object.", """Write it as '{"key": value}'.""")
    given = {
        "pipeline_parallel_size": pp,
        "enable_expert_parallel": ep or None,
        "quantization": quantization,
        "hf_overrides": overrides,
        "load_format": load_format,
        "platform": platform,
    }
    return {name: value for name, value in given.items() if value is not None}
