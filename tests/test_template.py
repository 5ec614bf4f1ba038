"""Chat templates of the shapes that repos have: which kinds of input each has a place for, by reading the template."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ckaudit.materialize.template import ChatTemplate

LOOP = "{% for m in messages %}{{ m.role }}: "
END = "\n{% endfor %}"
PLACES = {
    "a model of text, by adding": (LOOP + "{{ '' + m.content }}" + END, ""),
    "a model of text, by printing": (LOOP + "{{ m.content }}" + END, ""),
    "as JSON": (LOOP + "{{ m.content if m.content is string else m.content | tojson }}" + END, ""),
    "texts alone": (LOOP + "{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}" + END, ""),
    "texts, each on its line": (LOOP + "{% for c in m.content %}{{ c.text }}\n{% endfor %}" + END, ""),
    "the first part": (LOOP + "{{ m.content[0].text }}" + END, ""),
    "a word of regret": (LOOP + "{% for c in m.content %}{{ c.text or '[no ' ~ c.type ~ ' here]' }}{% endfor %}" + END, ""),
    "roles that alternate": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + LOOP + "{% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }}{% endfor %}" + END, "image",
    ),
    "a system message first": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
        + LOOP + "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{{ '<image>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}" + END, "image",
    ),
    "pictures before words": (
        LOOP + "{% for c in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
        "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}" + END, "image",
    ),
    "words before pictures": (
        LOOP + "{% if m.content[0].type != 'text' %}{{ raise_exception('text first') }}{% endif %}"
        "{% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }}{% endfor %}" + END, "image",
    ),
    "by the key of its data": (  # as Qwen2-Audio's, which asks the message for the type
        LOOP + "{% for c in m.content %}{% if 'audio' in c or 'audio_url' in c or m.type == 'audio' %}<audio>{% else %}{{ c.text }}"
        "{% endif %}{% endfor %}" + END, "audio",
    ),
    "by the type's own name": (LOOP + "{% for c in m.content %}{{ c.text or '<' ~ c.type ~ '>' }}{% endfor %}" + END, "image video audio"),
    "always one": (LOOP + "<image>{{ m.content if m.content is string else m.content | map(attribute='text') | join }}" + END, "image"),
}  # fmt: skip


def tokenizer(template: str | None) -> Any:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")))
    words.chat_template = template
    return words


def processor(template: str | None) -> Any:
    """As one whose template only its tokenizer has."""
    tokens = {f"{kind}_token": f"<{kind}>" for kind in ("image", "video", "audio")}
    return SimpleNamespace(chat_template=None, tokenizer=tokenizer(template), **tokens)


@pytest.mark.parametrize("name", PLACES)
def test_kinds_that_a_template_has_a_place_for(name: str) -> None:
    source, kinds = PLACES[name]
    template = ChatTemplate.of(processor(source))
    assert template is not None
    there = [kind for kind in ("image", "video", "audio") if not template.leaves_out(kind)]
    assert there == kinds.split()
    for kind in there:
        written = template.mixed(kind, "what is this?")
        assert written is not None
        assert f"<{kind}>" in written
        assert "what is this?" in written


def test_without_a_template_or_with_one_that_only_raises_nothing_is_said() -> None:
    assert ChatTemplate.of(processor(None)) is None
    broken = ChatTemplate.of(processor("{{ raise_exception('no') }}"))
    assert broken is not None
    assert broken.text("x") is None
    assert not broken.leaves_out("image")
