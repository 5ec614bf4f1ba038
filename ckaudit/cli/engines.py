"""`ckaudit engines`: the releases of vLLM that are kept on this machine."""

from typing import Annotated

import typer

from ckaudit.cli.guard import guarded
from ckaudit.cli.options import Debug

engines = typer.Typer(
    help="Keep releases of vLLM: their Python files, not installed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Spec = Annotated[str, typer.Argument(metavar="SPEC", help="vllm==X, or a range such as 'vllm>=0.33'.")]


def list_(debug: Debug = False) -> None:  # noqa: ARG001  (read by `guarded`)
    """List the releases that are kept, with what they take on disk."""
    from ckaudit.cli import console
    from ckaudit.engines.vllm import store

    found = store.releases()
    lines = [f"vllm=={r.version}  {r.bytes / 1e6:,.0f} MB  {r.wheel}" for r in found]
    console.emit("\n".join([*lines, f"{len(found)} kept in {store.folder()}", ""]))


def add(spec: Spec, debug: Debug = False) -> None:  # noqa: ARG001  (read by `guarded`)
    """Fetch a release with pip and keep its Python files."""
    from ckaudit.cli import console
    from ckaudit.engines import vllm
    from ckaudit.engines.vllm import store

    rest = _rest(spec)
    with console.watched() as progress:
        if rest.startswith("==") and "*" not in rest:
            kept: tuple[str, ...] = (store.add(rest[2:], progress=progress).version,)
        else:
            kept = vllm.fetch(rest, progress=progress)
    console.emit("".join(f"vllm=={version} is kept\n" for version in kept))


def remove(spec: Annotated[str, typer.Argument(metavar="SPEC", help="vllm==X.")], debug: Debug = False) -> None:  # noqa: ARG001  (read by `guarded`)
    """Forget a release."""
    from ckaudit.cli import console
    from ckaudit.engines.vllm import store
    from ckaudit.errors import UsageError

    if not store.remove(_rest(spec).removeprefix("==")):
        raise UsageError(f"{spec} is not kept here.", "`ckaudit engines list` shows what is.")
    console.emit(f"{spec} is gone\n")


def _rest(spec: str) -> str:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    from ckaudit.errors import UsageError

    rest = spec.removeprefix("vllm").strip()
    try:
        wanted = SpecifierSet(rest)
    except InvalidSpecifier:
        wanted = SpecifierSet()
    if not spec.startswith("vllm") or not len(wanted):
        raise UsageError(f"{spec} names no release.", "Write vllm==X.")
    return rest


engines.command("list")(guarded(list_))
engines.command("add")(guarded(add))
engines.command("remove")(guarded(remove))
