"""Spoiled checkpoints of many architectures, replayed: does the verdict change, in the right place, for every kind of fault?

    python benchmarks/vllm_mutations.py 0.33.0 --rows rows.jsonl [--only LlamaForCausalLM …]
    python benchmarks/vllm_mutations.py 0.33.0 --rows rows.jsonl --page docs/vllm-mutations.md

`tests/vllm/mutations.py` says what is spoiled, and what must be seen; the checkpoints are those of `tests/vllm/architectures.py`, of two
layers. One worker does all. Rows that are in the file already are kept, so that a run can be done in parts. `--page` puts the
table, with every disagreement below it, into the page, between its two markers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ckaudit.engines import EngineOptions, select
from ckaudit.progress import NullProgress
from tests.vllm import architectures, mutations

BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"
ARCHITECTURES = """
    LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Phi3ForCausalLM
    GPT2LMHeadModel GPTNeoXForCausalLM GPTJForCausalLM OPTForCausalLM BloomForCausalLM FalconForCausalLM StableLmForCausalLM
    Starcoder2ForCausalLM CohereForCausalLM OlmoForCausalLM Olmo2ForCausalLM Glm4ForCausalLM Exaone4ForCausalLM NemotronHForCausalLM
    GraniteForCausalLM SmolLM3ForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM MixtralForCausalLM OlmoeForCausalLM
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM Glm4MoeForCausalLM GraniteMoeForCausalLM GptOssForCausalLM Qwen3NextForCausalLM
    MambaForCausalLM Mamba2ForCausalLM JambaForCausalLM FalconH1ForCausalLM Lfm2ForCausalLM BertModel RobertaModel
    ModernBertModel WhisperForConditionalGeneration LlavaForConditionalGeneration Qwen2VLForConditionalGeneration
    Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration Gemma3ForConditionalGeneration
    InternVLForConditionalGeneration SmolVLMForConditionalGeneration PaliGemmaForConditionalGeneration
""".split()  # noqa: SIM905
"""Dense, with experts, hybrid, state space, encoders, pictures and sound."""


def run(release: str, rows: Path, only: Sequence[str], budget: float) -> None:
    """Judge what is not yet in `rows`, and append to it."""
    done = {row.architecture for row in read(rows)}
    (engine,) = select(f"vllm=={release}")
    try:
        for name in [a for a in only or ARCHITECTURES if a not in done]:
            try:
                made = architectures.make(name, 2)
            except architectures.UnmakeableError as error:
                print(name, "cannot be made:", error, flush=True)
                continue
            found = mutations.judge(
                made, lambda c: engine.plan(c, EngineOptions(cache=False, budget=budget), NullProgress())
            )
            with rows.open("a") as file:
                file.writelines(json.dumps(row._asdict()) + "\n" for row in found)
            for row in found:
                if row.wrong:
                    print(f"{name} · {row.kind}: {row.verdict}; {row.wrong}", flush=True)
            print(f"{name}: {len(found)} mutations", flush=True)
    finally:
        engine.close()  # type: ignore[attr-defined]


def read(rows: Path) -> list[mutations.Row]:
    lines = rows.read_text().splitlines() if rows.exists() else []
    return [mutations.Row(**{**json.loads(line), "told": tuple(json.loads(line)["told"])}) for line in lines]


def table(rows: Sequence[mutations.Row]) -> str:
    """A row for each kind of mutation: how many, the verdicts, the checks that told them, and what disagrees."""
    kinds: dict[str, list[mutations.Row]] = defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row)
    out = ["| mutation | checkpoints | `fails` | `loads_with_loss` | told by | disagree |", "|---|---|---|---|---|---|"]
    for kind, members in sorted(kinds.items()):
        verdicts = Counter(r.verdict for r in members)
        told = Counter(check for r in members for check in set(r.told))
        by = ", ".join(f"{check} {n}" for check, n in told.most_common())
        wrong = sum(r.wrong is not None for r in members)
        out.append(
            f"| {kind} | {len(members)} | {verdicts['fails']} | {verdicts['loads_with_loss']} | {by} | {wrong} |"
        )
    odd = [f"- {r.architecture}, {r.kind}: {r.verdict}; {r.wrong}" for r in rows if r.wrong]
    head = (
        f"{len({r.architecture for r in rows})} architectures, {len(rows)} spoiled checkpoints, {len(odd)} disagree.\n"
    )
    return "\n".join([head, *out, "", *odd])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("release")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--budget", type=float, default=120)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page is not None:
        head, _, rest = options.page.read_text("utf-8").partition(BEGIN)
        text = f"{head}{BEGIN}\n{table(read(options.rows))}\n{END}{rest.partition(END)[2]}"
        options.page.write_text(text, "utf-8")
    else:
        run(options.release, options.rows, options.only, options.budget)


if __name__ == "__main__":
    main()
