"""CK7xx: what is wrong with a rule book's own rules, by themselves and over a list of names (`ckaudit rules lint`).

Only mappers are judged: in a hand-written loop the first row that lands wins, so its rows cannot meet each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ckaudit.checks.mappers import Place, inside, places, probe, way
from ckaudit.findings import Check, Finding, Severity, Skip
from ckaudit.mapper import Mapped, Rule, matches, rewrite, shard_text
from ckaudit.naming import printable
from ckaudit.plan import Step
from ckaudit.rulebook import template
from ckaudit.rulebook.book import Book, Section

CASCADES = Check("CK701", "rule that fires on another rule's output", "error")
SHADOWED = Check("CK702", "rule that an earlier rule shadows", "warning")
UNUSED = Check("CK703", "rule that fires on no name", "note")
COLLIDES = Check("CK704", "two names mapped to one place", "error")
REPEATS = Check("CK705", "mapping that changes its own result", "warning")
DEAD = Check("CK706", "dotted key where names have no parent path", "error")
UNBOUNDED = Check("CK707", "key that does not end at a dot", "note")
CHECKS = (CASCADES, SHADOWED, UNUSED, COLLIDES, REPEATS, DEAD, UNBOUNDED)


def lint(book: Book, names: Sequence[str] = ()) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """Every finding about the rules of `book`, and the checks that need names when none are given.

    `names` are full tensor names; a loader on a submodule is given those that reach it, with its path stripped.
    """
    findings: list[Finding] = []
    for place in places(book, names):
        rewritten = {name: place.mapper.map(name) for name in place.seen}
        for check in (_cascades, _shadowed, _unbounded):
            findings += check(place, rewritten)
        findings += _dead(book, place)
        findings += _repeats(place, rewritten)
        if place.seen:
            findings += _unused(place, rewritten)
    for section in book.sections if names else ():
        findings += _collisions(book, section, names)
    skips = () if names else tuple(Skip(c.id, "no names were given") for c in (UNUSED, COLLIDES))
    return tuple(findings), skips


# ----- the checks -----


def _cascades(place: Place, rewritten: dict[str, Mapped]) -> Iterator[Finding]:
    """A rule whose key stands in what an earlier rule writes: between stacked rules, within one kind, or inside a word."""
    for i, later in enumerate(place.mapper.rules):
        fed = [earlier for earlier in place.mapper.rules[:i] if _feeds(earlier, later)]
        if not fed:
            continue
        hits = [n for n, m in rewritten.items() if any(_consecutive(m.steps, earlier, later) for earlier in fed)]
        grave = later.kind == "stacked" or any(_inside_word(later.key, earlier.to or "") for earlier in fed)
        chain = _chain(place.mapper.map(hits[0] if hits else probe(fed[0])).steps)
        writers = " and ".join(f"`{printable(earlier.key)}`" for earlier in fed)
        yield _finding(
            CASCADES, place, "error" if grave else "warning", [place.seen[n] for n in hits],
            f"{_quote(later)} fires on what {writers} {'writes' if len(fed) == 1 else 'write'}: {chain}",
            "Let keys match whole path segments (a dot at both ends), or order the rules so that no output holds a later key.",
        )  # fmt: skip


def _feeds(earlier: Rule, later: Rule) -> bool:
    """Whether `later` fires on the output of `earlier` in a way that nobody means: to rename first and stack then is meant."""
    patterns = ("regex", "renaming")
    if (
        earlier.to is None
        or earlier.kind in patterns
        or later.kind in patterns
        or not _meets(earlier, later, earlier.to)
    ):
        return False
    return earlier.kind == later.kind or _inside_word(later.key, earlier.to)


def _meets(earlier: Rule, later: Rule, text: str) -> bool:
    if later.kind == "prefix":
        return earlier.kind == "prefix" and text.startswith(later.key) and bool(later.key)
    if later.kind == "suffix":
        return earlier.kind == "suffix" and text.endswith(later.key)
    return bool(later.key) and later.key in text


def _consecutive(steps: tuple[Step, ...], earlier: Rule, later: Rule) -> bool:
    fired = [(s.rule, s.key) for s in steps]
    first, second = (earlier.kind, earlier.key), (later.kind, later.key)
    return first in fired and second in fired[fired.index(first) :]


def _inside_word(key: str, text: str) -> bool:
    """Whether the first `key` in `text` begins or ends in the middle of a word."""
    start = text.find(key)
    if start < 0 or not key:
        return False
    before, after = text[start - 1 : start] if start else "", text[start + len(key) : start + len(key) + 1]
    return bool((_word(before) and _word(key[0])) or (_word(after) and _word(key[-1])))


def _word(char: str) -> bool:
    return bool(char) and (char.isalnum() or char == "_")


def _shadowed(place: Place, rewritten: dict[str, Mapped]) -> Iterator[Finding]:
    """A rule that does not fire even on a name made of its own key, because an earlier one takes or drops it."""
    del rewritten
    for later in place.mapper.rules:
        if later.kind in ("regex", "renaming") or not later.key:
            continue
        steps = place.mapper.map(probe(later)).steps
        if any((s.rule, s.key) == (later.kind, later.key) for s in steps) or not steps:
            continue
        text = (
            f"{_quote(later)} cannot fire: `{printable(steps[0].key)}` comes first and takes its names: {_chain(steps)}"
        )
        yield _finding(SHADOWED, place, "warning", [], text, "Put the more particular rule first, or delete it.")


def _unused(place: Place, rewritten: dict[str, Mapped]) -> Iterator[Finding]:
    """The rules that none of the names reach, as one finding; only where the mapper is given any."""
    fired = {(s.rule, s.key) for m in rewritten.values() for s in m.steps}
    idle = [item for item in place.mapper.rules if (item.kind, item.key) not in fired]
    if idle:
        keys = ", ".join(f"{item.kind} `{printable(item.key)}`" for item in idle)
        text = f"{len(idle)} of {len(place.mapper.rules)} rules fire on none of the {len(rewritten)} names that reach them: {keys}"
        yield _finding(
            UNUSED, place, "note", [], text, "Delete them, or mend their keys, if these names are all there are."
        )


def _repeats(place: Place, rewritten: dict[str, Mapped]) -> Iterator[Finding]:
    """A rule that fires on its own result: names that are already mapped, or mapped twice, are spoilt."""
    for item in place.mapper.rules:
        if item.to is None or item.kind in ("regex", "renaming"):
            continue
        once = rewrite(item, probe(item))
        if once == probe(item) or not matches(item, once) or rewrite(item, once) == once:
            continue
        hits = [n for n, m in rewritten.items() if any((s.rule, s.key) == (item.kind, item.key) for s in m.steps)]
        already = [n for n in hits if item.to in n]
        text = f"{_quote(item)} changes its own result: `{printable(once)}` -> `{printable(rewrite(item, once))}`"
        severity: Severity = "warning" if already else "note"
        mend = "Make the key end where its own result goes on, such as with a dot."
        yield _finding(REPEATS, place, severity, [place.seen[n] for n in already], text, mend)


def _dead(book: Book, place: Place) -> Iterator[Finding]:
    """A key that begins with a dot, in a module whose parameters could only match without it."""
    if not place.at:
        return
    below = [inner[1] for text in _targets(book) if (inner := inside(place.at, "", text)) is not None]
    dead = [item for item in place.mapper.rules if _never(item, below)]
    if dead:
        names = [full for inner, full in place.seen.items() if any(inner.startswith(item.key[1:]) for item in dead)]
        keys = ", ".join(f"`{printable(item.key)}`" for item in dead)
        example = f"`{printable(dead[0].key[1:])}.weight`"
        text = f"{keys} can never fire: names there have no parent path ({example}), so nothing stands before the dot"
        yield _finding(
            DEAD, place, "error", names, text, "Put the rules on the model, where names are whole, or drop the dot."
        )


def _never(item: Rule, below: list[str]) -> bool:
    """Whether what the rule writes is a parameter of the module only without the dot in front."""
    if item.kind not in ("substring", "stacked") or not item.key.startswith(".") or not (item.to or "").startswith("."):
        return False
    bare = (item.to or "")[1:]
    return any(text.startswith(bare) for text in below) and not any(f".{bare}" in text for text in below)


def _targets(book: Book) -> Iterator[str]:
    """Parameter names of the book with one index for each set: enough to see what stands where."""
    indices = {name: [0] for name in book.sets}
    for row in book.parameters:
        for text in row.names:
            yield from template.expand(text, indices)


def _unbounded(place: Place, rewritten: dict[str, Mapped]) -> Iterator[Finding]:
    """A key that can match in the middle of a word: a note by itself, a warning where a name shows it."""
    mend = "Write the key from dot to dot (a prefix ends in a dot, a suffix begins with one)."
    quiet = []
    for item in place.mapper.rules:
        hits = [n for n, m in rewritten.items() if any(_step_inside(s, item) for s in m.steps)]
        if not hits:
            quiet += [item] if _open_ended(item) else []
            continue
        step = next(s for s in rewritten[hits[0]].steps if _step_inside(s, item))
        text = f"{_quote(item)} matches in the middle of a word: `{printable(step.before)}` -> `{printable(step.after or 'dropped')}`"
        yield _finding(UNBOUNDED, place, "warning", [place.seen[n] for n in hits], text, mend)
    if quiet:
        keys = ", ".join(f"{item.kind} `{printable(item.key)}`" for item in quiet)
        yield _finding(UNBOUNDED, place, "note", [], f"a key can match in the middle of a word: {keys}", mend)


def _open_ended(item: Rule) -> bool:
    if not item.key:
        return False  # an empty prefix puts something before every name, as meant
    if item.kind == "prefix":
        return _word(item.key[-1])
    if item.kind == "suffix":
        return _word(item.key[0])
    return item.kind in ("substring", "stacked") and _word(item.key[0])


def _step_inside(step: Step, item: Rule) -> bool:
    """Whether this step is `item` hitting the middle of a word; a key that ends in `_` is the start of a word on purpose."""
    if (step.rule, step.key) != (item.kind, item.key) or item.kind in ("regex", "renaming") or not item.key:
        return False
    name, key = step.before, item.key
    start = 0 if item.kind == "prefix" else len(name) - len(key) if item.kind == "suffix" else name.find(key)
    before, after = name[start - 1 : start] if start else "", name[start + len(key) :][:1]
    return (_word(before) and _word(key[0])) or (_word(after) and _word(key[-1]) and key[-1] != "_")


def _collisions(book: Book, section: Section, names: Sequence[str]) -> Iterator[Finding]:
    """Names that the whole way through the loaders brings to one parameter and one shard."""
    ends: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for name in names:
        passed = list(way(book, section, name))
        if not passed or (mapped := passed[-1][2]) is None or mapped.name is None:
            continue  # dropped, or left to a loop that decides by the parameters it has
        ends[f"{book.loaders[passed[-1][0]].at}|{mapped.name}", shard_text(passed[-1][3])].append(name)
    for (end, shard), members in ends.items():
        if len(members) > 1:
            at, _, name = end.partition("|")
            place = f"{printable(at)}.{printable(name)}" if at else printable(name)
            text = (
                f"{len(members)} names end at `{place}`"
                + (f", shard {shard}" if shard else "")
                + f" ({section.releases})"
            )
            yield _made(
                COLLIDES,
                "error",
                members,
                text,
                "Let one rule tell them apart; the engine keeps whichever it loads last.",
            )


# ----- telling -----


def _quote(item: Rule) -> str:
    to = "dropped" if item.to is None else f"`{printable(item.to)}`"
    return f"{item.kind} rule `{printable(item.key)}` -> {to}"


def _chain(steps: tuple[Step, ...]) -> str:
    texts = [steps[0].before, *("dropped" if s.after is None else s.after for s in steps)] if steps else []
    return " -> ".join(f"`{printable(t)}`" for t in texts)


def _finding(check: Check, place: Place, severity: Severity, names: Iterable[str], text: str, mend: str) -> Finding:
    return _made(check, severity, names, f"{text}, {place.where}", mend)


def _made(check: Check, severity: Severity, names: Iterable[str], text: str, mend: str) -> Finding:
    listed = tuple(dict.fromkeys(names))
    return Finding(
        check=check.id, title=check.title, severity=severity, blame="engine", names=listed, count=max(1, len(listed)),
        message=f"{text}.", mend=mend,
    )  # fmt: skip
