"""The JSON report, version 1: shape, schema, stability."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from reports import HOSTILE, cascade, good, hostile, report, target, unjudged

from ckaudit.findings import Report, Skip
from ckaudit.report import json_v1, schema_v1

SCHEMA = json.loads(schema_v1.SCHEMA.read_text(encoding="utf-8"))

# The contract, typed once more by hand: a key may be added here, never renamed or dropped.
KEYS = {
    "Document": "schema_version tool target engines findings skips load forward perplexity adapter diff summary exit_code",
    "Adapter": "dialect method rank base_named base base_revision modules replaced engines",
    "AdapterEngine": "id bound absent untargeted converted form open",
    "Tool": "name version",
    "Target": "name revision source architectures model_type tensors parameters bytes shards dtypes",
    "Engine": "id engine release method requested verdict error options environment summary tp draft names",
    "EngineSummary": "loaded dropped ignored unmatched not_reached by_design bytes_lost parameters full partial none unknown",
    "TensorParallel": "size verdict error bytes_per_rank pp ep ranks lost",
    "Draft": "architecture verdict error layers",
    "DraftLayer": "path state names unwritten",
    "Name": "name fate into shard read chain",
    "Step": "rule key at from to",
    "Finding": "check title severity engine blame count bytes names wanted found message mend suppressed_by",
    "Diff": "source roundtrip identical identical_bytes changes",
    "Change": "kind rule text from_count to_count from_bytes to_bytes links",
    "Link": "from to",
    "Skip": "check engine reason",
    "Summary": "errors warnings notes skips suppressed not_judged",
}

SHAPES: dict[str, Report] = {
    "a finding": report(),
    "clean": report(plans=(good(),), findings=()),
    "no engine": report(plans=(), findings=()),
    "not judged": report(plans=(unjudged(),), findings=(), requested=frozenset({"vllm==0.33.0"})),
    "skips": report(
        skips=(Skip(check="CK301", engine="transformers", reason="no shapes"), Skip(check="x", reason="y"))
    ),
    "index only": report(target=target(parameters=None, bytes=None, dtypes={}), sizes={}),
    "from the Hub": report(target=target(source="hub", revision="0" * 40)),
    "no config": report(target=target(architectures=(), model_type=None)),
    "tensor parallel": report(
        plans=(
            cascade(
                tp=(
                    {"size": 2, "verdict": "loads", "error": None, "bytes_per_rank": 10},
                    {"size": 3, "verdict": "fails"},
                )
            ),
        )
    ),
    "sections": report(load={"seconds": 1.5}, forward={"finite": True}, perplexity={"value": 3.2}),
    "hostile": hostile(),
}


@pytest.mark.parametrize("made", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("names", [False, True])
def test_every_shape_is_valid(made: Report, names: bool) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json_v1.render(made, names=names)))


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("exit_code",), 4), (("schema_version",), 2), (("engines", 0, "verdict"), "maybe"), (("findings", 0, "blame"), "you"),
        (("target", "tensors"), -1), (("findings", 0, "check"), "201"), (("engines", 0, "names", 0, "read"), 1.5),
    ],
)  # fmt: skip
def test_the_schema_refuses_what_is_wrong(path: tuple[Any, ...], wrong: object) -> None:
    made = json.loads(json_v1.render(report(), names=True))
    place = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(made)


def test_the_schema_itself_is_valid_and_in_step() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert schema_v1.SCHEMA.read_text(encoding="utf-8") == schema_v1.schema(), "run python -m ckaudit.report.schema_v1"


@pytest.mark.parametrize(("kind", "keys"), KEYS.items(), ids=KEYS)
def test_no_key_of_the_contract_is_gone(kind: str, keys: str) -> None:
    properties = SCHEMA["$defs"][kind]["properties"]
    assert set(keys.split()) <= properties.keys()
    optional = {"names"} if kind == "Engine" else set()  # the others are always there: `null` means not run
    assert set(SCHEMA["$defs"][kind]["required"]) == properties.keys() - optional


@pytest.mark.parametrize("kind", KEYS)
def test_every_key_is_explained(kind: str) -> None:
    assert [k for k, v in SCHEMA["$defs"][kind]["properties"].items() if not v.get("description")] == []


def test_values() -> None:
    made = json.loads(json_v1.render(report(requested=frozenset({"transformers"})), names=True))
    live, rules = made["engines"]
    assert (live["requested"], rules["requested"]) == (True, False)
    assert (live["verdict"], rules["verdict"]) == ("loads", "fails")
    assert rules["error"] == "There is no parameter named 'qkqkv_proj'"
    summary = rules["summary"]
    assert sum(summary[k] for k in ("loaded", "dropped", "ignored", "unmatched", "not_reached", "by_design")) == 3
    assert (summary["bytes_lost"], summary["partial"], summary["none"]) == (2000, 1, 1)
    assert rules["names"][0]["chain"][1] == {
        "rule": "stacked",
        "key": "v_proj",
        "at": "attn",
        "from": "qkv_proj.weight",
        "to": "qkqkv_proj.weight",
        "shard": "v",
    }
    assert made["summary"] == {"errors": 1, "warnings": 0, "notes": 0, "skips": 0, "suppressed": 0, "not_judged": []}
    assert made["exit_code"] == 1


def test_names_are_there_only_when_asked_for() -> None:
    assert all("names" not in e for e in json.loads(json_v1.render(report()))["engines"])


def test_hostile_names_survive_as_ascii() -> None:
    out = json_v1.render(hostile(), names=True)
    assert out.isascii()
    assert "\x1b" not in out
    assert json.loads(out)["engines"][0]["names"][0]["name"] == HOSTILE


def test_a_lone_surrogate_is_no_crash() -> None:
    made = report(findings=(msgspec.structs.replace(report().findings[0], names=("\ud800",)),))
    assert json.loads(json_v1.render(made))["findings"][0]["names"] == ["\ud800"]


def test_two_runs_give_the_same_bytes() -> None:
    assert json_v1.render(report(), names=True) == json_v1.render(report(), names=True)


def test_the_schema_ships_inside_the_package() -> None:
    assert schema_v1.SCHEMA.parent == Path(json_v1.__file__).parent
