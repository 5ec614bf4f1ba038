"""CK201, CK202, CK208, CK217: what an engine's own rules do to names. Chains come from the mapper that speaks vLLM's semantics."""

from collections.abc import Iterable

from ckaudit.checkpoint import Checkpoint
from ckaudit.mapper import Mapper, Rule
from ckaudit.plan import Plan, RuleHit
from tests.toy import checkpoint, findings, only, plan

BARE = [Rule("stacked", p, "qkv_proj", (p[0],)) for p in ("q_proj", "k_proj", "v_proj")]
DOTTED = [Rule("stacked", f".{p}", ".qkv_proj", (p[0],)) for p in ("q_proj", "k_proj", "v_proj")]
QKV = [f"attn.{p}_proj.{t}" for p in "qkv" for t in ("weight", "bias")]


def mapped(
    source: Checkpoint,
    rules: Iterable[Rule],
    parameters: Iterable[str],
    at: str = "",
    id: str = "toy==2",
    twice: bool = False,
) -> Plan:
    """The plan of an engine whose rules sit on the module `at`, whose loader sees names without `at`."""
    mapper = Mapper(rules, at)
    chains, into = {}, {}
    for name in source.tensors:
        local = name.removeprefix(f"{at}.") if at else name
        first = mapper.map(local)
        steps, out = first.steps, first.name
        if twice and out is not None:
            second = mapper.map(out)
            steps, out = (*steps, *second.steps), second.name
        chains[name] = steps
        into[name] = f"{at}.{out}" if at else str(out)
    hits = tuple(
        RuleHit(r.kind, r.key, r.to, at, sum(s.key == r.key for c in chains.values() for s in c)) for r in mapper.rules
    )
    return plan(source, parameters, into.__getitem__, id=id, chains=chains, raises=True, rules=hits)


class TestCascade:
    def test_a_stacked_rule_fires_on_what_another_wrote(self) -> None:
        # q and k become qkqkv, v is right: 2 of 3, weight and bias
        source = checkpoint(QKV)
        finding = only(source, mapped(source, BARE, ["attn.qkv_proj.weight", "attn.qkv_proj.bias"], "attn"))
        assert (finding.check, finding.severity, finding.blame, finding.count) == ("CK201", "error", "engine", 4)
        assert "`q_proj.weight` -> `qkv_proj.weight` -> `qkqkv_proj.weight`" in finding.message
        assert "become v" in finding.message

    def test_a_tensor_that_came_fused(self) -> None:
        source = checkpoint(["mlp.gate_up_proj.weight"])
        finding = only(
            source, mapped(source, [Rule("substring", "up_proj", "gate_up_proj")], ["mlp.gate_up_proj.weight"])
        )
        assert (finding.check, finding.count) == ("CK201", 1)
        assert "gate_gate_up_proj" in finding.message

    def test_the_release_that_loads_them_is_named(self) -> None:
        source = checkpoint(QKV)
        parameters = ["attn.qkv_proj.weight", "attn.qkv_proj.bias"]
        good = mapped(source, DOTTED, parameters, id="toy==1")
        finding = only(source, mapped(source, BARE, parameters, "attn"), good)
        assert finding.mend.startswith("Use toy==1")

    def test_rules_that_chain_on_purpose_are_left_alone(self) -> None:
        rules = [
            Rule("substring", "llm.", "language_model."),
            Rule("prefix", "language_model.", "text.language_model."),
        ]
        source = checkpoint(["llm.norm.weight"])
        assert findings(source, mapped(source, rules, ["text.language_model.norm.weight"])) == []

    def test_a_stray_with_a_chain_that_spoils_nothing_is_no_cascade(self) -> None:
        rules = [
            Rule("substring", "llm.", "language_model."),
            Rule("prefix", "language_model.", "text.language_model."),
        ]
        source = checkpoint(["llm.extra.weight", "llm.norm.weight"])
        assert only(source, mapped(source, rules, ["text.language_model.norm.weight"])).check == "CK203"


class TestNeverFires:
    def test_a_dotted_rule_where_the_path_is_stripped(self) -> None:
        source = checkpoint(QKV)
        finding = only(source, mapped(source, DOTTED, ["attn.qkv_proj.weight", "attn.qkv_proj.bias"], "attn"))
        assert (finding.check, finding.severity, finding.blame, finding.count) == ("CK202", "error", "engine", 6)
        assert "`attn`" in finding.message

    def test_on_the_model_the_same_rule_fires(self) -> None:
        source = checkpoint(QKV)
        assert findings(source, mapped(source, DOTTED, ["attn.qkv_proj.weight", "attn.qkv_proj.bias"])) == []

    def test_an_idle_rule_that_no_stray_would_need(self) -> None:
        source = checkpoint(["attn.out_proj.weight", "attn.extra.weight"])
        assert only(source, mapped(source, DOTTED, ["attn.out_proj.weight"], "attn")).check == "CK203"


class TestTwice:
    SUFFIX = (Rule("suffix", "head.weight", "lm_head.weight"),)

    def test_a_mapper_that_runs_twice(self) -> None:
        source = checkpoint(["head.weight"])
        finding = only(source, mapped(source, self.SUFFIX, ["lm_head.weight"], twice=True))
        assert (finding.check, finding.blame, finding.count) == ("CK208", "engine", 1)
        assert "`head.weight` -> `lm_head.weight` -> `lm_lm_head.weight`" in finding.message

    def test_once_is_right(self) -> None:
        source = checkpoint(["head.weight"])
        assert findings(source, mapped(source, self.SUFFIX, ["lm_head.weight"])) == []


class TestInsideWord:
    RULE = (Rule("substring", "weight_g", "parametrizations.weight.original0"),)

    def test_a_key_that_is_part_of_a_longer_word(self) -> None:
        source = checkpoint([f"experts.weight_gate.{i}" for i in range(8)])
        finding = only(source, mapped(source, self.RULE, list(source.tensors)))
        assert (finding.check, finding.blame, finding.count) == ("CK217", "engine", 8)
        assert "original0ate" in finding.message

    def test_the_word_it_was_made_for(self) -> None:
        source = checkpoint(["conv.weight_g"])
        assert findings(source, mapped(source, self.RULE, ["conv.parametrizations.weight.original0"])) == []


def test_without_a_list_of_parameters_only_the_middle_of_a_word_is_told() -> None:
    source = checkpoint(QKV)
    broken = mapped(source, BARE, [], "attn")
    assert {f.check for f in findings(source, broken) if f.severity == "error"} >= {"CK201"}
