"""How long `ckaudit ppl` takes, and whether its two sides agree.

    python benchmarks/ppl.py                                  the tiny model on this machine's CPU
    python benchmarks/ppl.py --device cuda --minicpm FOLDER   a MiniCPM-V 4.6-shaped model, made in FOLDER first (2.6 GB, random weights)

Floor of a row: one forward pass of its tokens. Everything above that is reading pictures, templates and tokenising.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "fixtures" / "tiny-qwen2-vl"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def make_minicpm(folder: Path) -> Path:
    """The fixture's config with random bf16 weights, MiniCPM-V's own processor and the tiny tokenizer."""
    import torch
    from transformers import AutoTokenizer, MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

    folder.mkdir(parents=True, exist_ok=True)
    names = ("image", "video", "image_start", "image_end", "slice_start", "slice_end", "image_id_start", "image_id_end")
    special = {f"{name}_token": f"<|mini_{name}|>" for name in names}
    tokenizer = AutoTokenizer.from_pretrained(TINY, extra_special_tokens=special)
    tokenizer.chat_template = (
        (TINY / "chat_template.jinja")
        .read_text()
        .replace("<|vision_start|><|image_pad|><|vision_end|>", special["image_token"])
    )
    tokenizer.save_pretrained(folder)
    MiniCPMV4_6ImageProcessorPil().save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "MiniCPMV4_6Processor"}))
    config = MiniCPMV4_6Config(**json.loads((ROOT / "fixtures" / "minicpm-v-4.6" / "config.json").read_text()))
    config.image_token_id = tokenizer.convert_tokens_to_ids(special["image_token"])
    config.video_token_id = tokenizer.convert_tokens_to_ids(special["video_token"])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = MiniCPMV4_6ForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return folder


def timed(label: str, repeats: int, **options: object) -> dict[str, object]:
    """Median seconds of a whole run (model load apart), rows and tokens a second."""
    from ckaudit.perplexity.run import Repo, run
    from ckaudit.progress import NullProgress
    from ckaudit.scores import PplOptions

    folder = Path(str(options.pop("folder", TINY)))
    whole, scored, outcome = [], [], None
    for _ in range(repeats):
        began = time.perf_counter()
        outcome = run(Repo(folder.name, folder, label), PplOptions(**options), NullProgress())
        whole.append(time.perf_counter() - began)
        scored.append(outcome.score.seconds)
    assert outcome is not None
    row = {
        "run": label,
        "rows": len(outcome.score.rows),
        "tokens": outcome.score.tokens,
        "perplexity": outcome.score.perplexity,
        "seconds": statistics.median(whole),
        "rows_per_second": len(outcome.score.rows) / statistics.median(scored),
        "relative": outcome.comparison.relative if outcome.comparison else None,
    }
    print("  ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cpu")
    options.add_argument("--minicpm", type=Path)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--json", type=Path)
    args = options.parse_args()
    from ckaudit.scores import Settings

    settings = Settings(dtype="bfloat16" if args.minicpm else "float32", device=args.device)
    if args.minicpm:
        folder = make_minicpm(args.minicpm)
        results = [timed("MiniCPM-V 4.6-shaped", args.repeats, folder=folder, settings=settings)]
    else:
        from openai_server import OpenAIServer

        results = [timed("tiny model, 60 rows", args.repeats, settings=settings)]
        with OpenAIServer(TINY) as url:
            results.append(timed("the same through a server", args.repeats, settings=settings, against=url))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
