"""An adapter on the names in the files of its base, where no engine knows that: diffusion pipelines above all. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from ckaudit.adapters import Adapter, Unit
from ckaudit.adapters.base import Base, kind_of
from ckaudit.adapters.outcome import Outcome
from ckaudit.adapters.surface import Surface
from ckaudit.checkpoint import Checkpoint

_ORIGINAL = re.compile(
    r"(diffusion_model[._])?(input_blocks|middle_block|output_blocks|double_blocks|single_blocks|joint_blocks)[._]"
)
_DIFFUSION = "model.diffusion_model."


def diffusion_root(checkpoint: Checkpoint) -> str:
    """What a file of a whole pipeline in the layout of its authors puts before the names of the denoiser."""
    return _DIFFUSION if any(n.startswith(_DIFFUSION) for n in checkpoint.tensors) else ""


def look(adapter: Adapter, base: Base, surfaces: dict[str, Surface], unit: Unit) -> Outcome:
    path = unit.path
    places = [(name, s) for name, s in surfaces.items() if _serves(unit, name, kind_of(base.checkpoint))]
    look: Callable[[Surface, str], str | None] = (
        (lambda s, m: s.flat.get(m)) if unit.parts[0].flat else (lambda s, m: m if s.holds(m) else None)
    )
    for name, surface in places:
        # A component's own name may be part of its paths too: both spellings are looked for.
        for spelling in (unit.module, unit.path, unit.module.removeprefix("diffusion_model.")):
            found = look(surface, spelling)
            if found is not None:
                return Outcome(unit, "bound", path, f"{name}.{found}" if name else found)
    if adapter.dialect == "xlabs":  # its factors sit on a block's processor, which is no module with weights
        block = unit.module.partition("processor.")[0]
        if any(m.startswith(block) for _, s in places for m in s.modules):
            return Outcome(unit, "bound", path, block.removesuffix("."))
    theirs = any(_ORIGINAL.match(m) for s in surfaces.values() for m in s.modules)
    if theirs != bool(_ORIGINAL.match(unit.module) or adapter.dialect == "xlabs") and (theirs or not base.is_model):
        which = ("the base", "the adapter") if theirs else ("the adapter", "the base")
        why = f"{which[0]} is named as in its authors' own code and {which[1]} is not; what loads them converts one, which is not judged"
        return Outcome(unit, "open", path, why=why)
    return Outcome(unit, "absent", path)


def _serves(unit: Unit, place: str, kind: str | None) -> bool:
    """Whether `unit` belongs into the base's component `place` (`""`: the base is one component, of this kind)."""
    wanted = [unit.component]
    if unit.parts[0].flat and unit.component == "unet":
        wanted.append("transformer")  # kohya calls every denoiser so
    if not unit.component or place:
        return not unit.component or place in wanted
    return kind is None or any(w.startswith(kind) for w in wanted)
