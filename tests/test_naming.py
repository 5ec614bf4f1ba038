"""naming: order, folding, escaping, nearest names. Expected values follow from the reasoning beside them."""

import unicodedata
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckaudit.naming import Nearest, alike, fold, folds, natural_key, nearest, printable, shape


class TestNaturalKey:
    def test_numbers_compare_as_numbers(self) -> None:
        assert sorted(["l.10.w", "l.9.w", "l.w"], key=natural_key) == ["l.9.w", "l.10.w", "l.w"]

    def test_never_ties_on_different_names(self) -> None:
        assert natural_key("l.01") != natural_key("l.1")

    def test_a_number_too_long_for_int_is_no_error(self) -> None:
        # int() refuses more than 4300 digits
        assert natural_key("w" + "9" * 9000) > natural_key("w8")

    @given(st.lists(st.text(alphabet="a.01²٣", max_size=6)))
    def test_is_a_total_order(self, names: list[str]) -> None:
        backwards = names[::-1]
        assert sorted(names, key=natural_key) == sorted(backwards, key=natural_key)


class TestFold:
    @pytest.mark.parametrize(
        ("names", "lines"),
        [
            ([f"layers.{i}.w" for i in range(24)], ["layers.{0..23}.w"]),
            (["l.0.w", "l.2.w", "l.5.w"], ["l.{0,2,5}.w"]),
            (["l.0.w", "l.1.w"], ["l.{0,1}.w"]),
            (["l.0.w", "l.1.w", "l.2.w", "l.7.w"], ["l.{0..2,7}.w"]),
            (["l.3.w"], ["l.3.w"]),
            # two tensors are not the four that {0,1} x {0,1} would claim
            (["l.0.e.0.w", "l.1.e.1.w"], ["l.0.e.0.w", "l.1.e.1.w"]),
            ([f"l.{i}.e.{j}.w" for i, j in product(range(3), range(4))], ["l.{0..2}.e.{0..3}.w"]),
            # one expert of one layer is not there: no product, so the layer is told apart
            (
                [f"l.{i}.e.{j}.w" for i, j in product(range(4), range(4)) if (i, j) != (2, 3)],
                ["l.{0,1,3}.e.{0..3}.w", "l.2.e.{0..2}.w"],
            ),
            # a number inside a word is part of the word
            (["m.w1", "m.w2", "m.w3"], ["m.w1", "m.w2", "m.w3"]),
            # padding is kept, and padded numbers do not mix with others
            ([f"m-0000{i}-of-00004.safetensors" for i in range(1, 5)], ["m-{00001..00004}-of-00004.safetensors"]),
            (["m-01", "m-1"], ["m-1", "m-01"]),
            # kohya spells paths with underscores
            (["lora_unet_down_0_to_q.a", "lora_unet_down_1_to_q.a"], ["lora_unet_down_{0,1}_to_q.a"]),
            # braces of the name's own must not read as a fold
            (["l.{0..23}.w"], ["l.\\x7b0..23\\x7d.w"]),
            ([], []),
            (["", "a"], ["", "a"]),
        ],
    )
    def test_lines(self, names: list[str], lines: list[str]) -> None:
        assert sorted(fold(names)) == sorted(lines)

    def test_natural_order(self) -> None:
        assert fold(["l.10.b", "l.9.a", "x"]) == ["l.9.a", "l.10.b", "x"]

    @settings(max_examples=300, deadline=None)
    @given(st.sets(st.from_regex(r"\A[ab]\.[0-3](\.[cd]\.(0|1|2|01|02)(_[01])?)?\Z")))
    def test_stands_for_exactly_the_names(self, names: set[str]) -> None:
        members = [m for f in folds(names) for m in f.members()]
        assert sorted(members) == sorted(names)
        assert sum(f.count for f in folds(names)) == len(names)

    @given(st.lists(st.text(alphabet="a.{}0\\\u202e", max_size=5), unique=True))
    def test_lines_of_different_folds_differ(self, names: list[str]) -> None:
        lines = fold(names)
        assert len(set(lines)) == len(lines)
        assert all(line.isprintable() for line in lines)

    def test_independent_of_input_order(self) -> None:
        names = [f"l.{i}.e.{j}.w" for i, j in product(range(5), range(5)) if (i * j) % 3]
        assert fold(names) == fold(reversed(names))


class TestPrintable:
    def test_plain_text_is_unchanged(self) -> None:
        assert printable("model.layers.0.q_proj.weight é 中") == "model.layers.0.q_proj.weight é 中"

    @pytest.mark.parametrize(
        "char",
        list(
            "\x1b\x00\x7f\x85\x9b\n\r\t\u2028\u2029\u202e\u2066\u200b\u200d\ufeff\u061c\u05d0\u0627\u0301\ufe0f"
            "\u034f\u3164\u00a0\u00ad\ud800\ue000\U000e0041\U000e0100"
        ),
    )
    def test_escapes_what_a_terminal_would_act_on_or_hide(self, char: str) -> None:
        shown = printable(f"a{char}b")
        assert char not in shown
        assert shown.isascii()
        assert shown.encode("ascii").decode("unicode_escape") == f"a{char}b"

    @given(st.text(st.characters(exclude_categories=())))
    def test_shows_one_line_of_visible_text_that_reads_back(self, text: str) -> None:
        shown = printable(text)
        assert shown.isprintable()
        assert not any(unicodedata.bidirectional(c) in ("R", "AL") for c in shown)
        escaped = "".join(c if c.isascii() else f"\\U{ord(c):08x}" for c in shown)
        assert escaped.encode("ascii").decode("unicode_escape") == text

    def test_a_backslash_of_the_name_is_not_an_escape_of_ours(self) -> None:
        assert printable("\\n") == "\\\\n" != printable("\n")


class TestNearest:
    EXPECTED = (
        *(
            f"model.layers.{i}.self_attn.{leaf}.weight"
            for i in range(4)
            for leaf in ("q_proj", "k_proj", "o_proj", "q_norm")
        ),
        "model.norm.weight",
        "lm_head.weight",
    )

    def test_keeps_the_layer(self) -> None:
        assert nearest("model.layers.3.self_attn.query_proj.weight", self.EXPECTED) == (
            "model.layers.3.self_attn.q_proj.weight"
        )

    def test_a_layer_that_is_not_there_still_finds_the_shape(self) -> None:
        assert (
            nearest("model.layers.9.self_attn.q_prj.weight", self.EXPECTED) == "model.layers.0.self_attn.q_proj.weight"
        )

    def test_nothing_alike_is_none(self) -> None:
        assert nearest("gene_qformer.bins", self.EXPECTED) is None
        assert nearest("x", ()) is None

    def test_a_name_with_a_hash_of_its_own(self) -> None:
        assert nearest("l.3.w#", ("l.#.w#",)) == "l.#.w#"

    def test_thousands_against_thousands_of_shapes(self) -> None:
        # 3,000 shapes that all share one word: comparing each with each would be 9,000,000 comparisons (minutes)
        def word(i: int) -> str:
            return "".join(chr(97 + int(c)) for c in f"{i:04d}")

        finder = Nearest(f"model.{word(i)}.weight" for i in range(3000))
        assert finder.find("model.xabcde.weight") is not None
        assert all(finder.find(f"model.{word(i)}.weights") == f"model.{word(i)}.weight" for i in range(0, 3000, 3))


NUMBERED = st.lists(
    st.lists(
        st.sampled_from(
            ["layers", "experts", "3", "10", "007", "w1", "fc2", "#", "a\nb", "1\n2", "\n", "", "٣", "1234567"]
        ),
        max_size=6,
    ).map(".".join),
    max_size=12,
    unique=True,
)


@given(NUMBERED)
def test_names_that_differ_in_numbers_are_alike(names: list[str]) -> None:
    found = alike(names)
    assert [n for n in names if n in found[shape(n)].names] == names
    assert sum(len(group.names) for group in found.values()) == len(names)
    assert list(found) == list(dict.fromkeys(map(shape, names)))
    for group in found.values():
        order = [names.index(n) for n in group.names]
        assert order == sorted(order)
        segments = [s for n in group.names if "#" not in n for s in n.split(".")]
        assert group.numbers == [s for s in segments if s.isascii() and s.isdecimal()]


def test_the_shape_of_a_name() -> None:
    assert shape("model.layers.3.experts.12.w1.weight") == "model.layers.#.experts.#.w1.weight"
    assert shape("3.3") == "#.#"
    assert shape("fc1.w_2.x3") == "fc1.w_2.x3"
