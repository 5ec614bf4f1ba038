"""What the checks know of names: stacks of layers and experts, held against a slow reading of one name after another."""

from __future__ import annotations

import re
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from ckaudit.checks.facts import Facts
from tests.toy import checkpoint

SEGMENTS = ["model", "layers", "experts", "mlp_experts", "0", "1", "2", "10", "03", "w", "gate", "up"]
NAMES = st.lists(
    st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=7).map(".".join), min_size=1, max_size=30, unique=True
)

Members = dict[str, dict[int, list[str]]]


def numbered(names: list[str]) -> Members:
    """Every number between two dots: path before it -> number -> what follows, name by name."""
    found: Members = defaultdict(lambda: defaultdict(list))
    for name in names:
        for match in re.finditer(r"(?<=\.)[0-9]{1,6}(?=\.)", name):
            found[name[: match.start() - 1]][int(match[0])].append(name[match.end() + 1 :])
    return found


@given(NAMES)
def test_stacks_are_those_of_the_names(names: list[str]) -> None:
    facts, every = Facts(checkpoint(names)), numbered(names)
    outermost = {path for path in every if not re.search(r"\.[0-9]{1,6}(\.|$)", path)}
    assert facts.stacks.keys() == outermost
    experts = {path for path in every if path.rpartition(".")[2] in ("experts", "mlp_experts")}
    found = {path: stack for stacks in facts.experts.values() for path, stack in stacks.items()}
    assert found.keys() == experts
    for path, stack in {**facts.stacks, **found}.items():
        assert stack.path == path
        assert stack.indices == sorted(every[path])
        assert {i: sorted(rests) for i, rests in stack.members.items()} == {
            i: sorted(rests) for i, rests in every[path].items()
        }
    for stacks in facts.experts.values():
        parts = {
            frozenset(re.sub(r"(?<![^.])[0-9]+(?![^.])", "#", r) for r in m)
            for s in stacks.values()
            for m in s.members.values()
        }
        assert stacks.uniform == (len(parts) == 1)


@given(NAMES)
def test_layers_have_several_modules(names: list[str]) -> None:
    every = numbered(names)
    whole = set()
    for path, members in every.items():
        sizes = sorted(len({rest.rpartition(".")[0] for rest in rests}) for rests in members.values())
        if not re.search(r"(^|\.)[0-9]{1,6}(\.|$)", path) and len(members) > 2 and sizes[len(sizes) // 2] > 1:
            whole.add(path)
    assert Facts(checkpoint(names)).layers.keys() == whole
