"""Inputs by what a model takes, beyond the plain cases: what it needs besides, what it has room for, and what a processor alone makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ckaudit.materialize import forward, processed  # noqa: E402
from ckaudit.materialize.circumstances import no_kernel, wants_device  # noqa: E402
from ckaudit.materialize.probe import Probe  # noqa: E402
from tests import tiny_models  # noqa: E402
from tests.test_load import run  # noqa: E402

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 320, "max_position_embeddings": 128,
}  # fmt: skip
_SPEECH = {
    "vocab_size": 81, "hidden_size": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_layers": 2,
    "decoder_ffn_dim": 64, "decoder_attention_heads": 4, "speech_decoder_prenet_units": 32, "speech_decoder_postnet_units": 32,
    "speaker_embedding_dim": 16, "num_mel_bins": 16,
}  # fmt: skip


def _musicgen(t: Any) -> Any:
    parts = {
        "text_encoder": t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=320),
        "audio_encoder": t.EncodecConfig(
            hidden_size=16, num_filters=4, codebook_size=64, codebook_dim=16, upsampling_ratios=[4, 2], num_lstm_layers=1
        ),
        "decoder": t.MusicgenDecoderConfig(
            hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, num_codebooks=4, pad_token_id=63
        ),
    }  # fmt: skip
    return t.MusicgenForConditionalGeneration(t.MusicgenConfig(**{k: v.to_dict() for k, v in parts.items()}))


def _pix2struct(t: Any) -> Any:
    text = {"hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 320}
    vision = {
        "hidden_size": 32, "patch_embed_hidden_size": 192, "d_ff": 64, "d_kv": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
        "patch_size": 8, "seq_len": 64,
    }  # fmt: skip
    config = t.Pix2StructConfig(text_config=text | {"decoder_start_token_id": 0}, vision_config=vision)
    return t.Pix2StructForConditionalGeneration(config)


def _spectrogram(t: Any) -> Any:
    return t.ASTForAudioClassification(
        t.ASTConfig(**{k: v for k, v in _TEXT.items() if k != "vocab_size"}, max_length=64, num_mel_bins=16)
    )


def _owlvit(t: Any) -> Any:
    text = {**_TEXT, "max_position_embeddings": 16}
    return t.OwlViTForObjectDetection(t.OwlViTConfig(text_config=text, vision_config=_VISION, projection_dim=32))


def _vilt(t: Any) -> Any:
    return t.ViltForQuestionAnswering(t.ViltConfig(**_TEXT, max_position_embeddings=40, image_size=32, patch_size=8))


def _mllama(t: Any) -> Any:
    vision = {
        "hidden_size": 32, "attention_heads": 4, "num_hidden_layers": 2, "num_global_layers": 1, "intermediate_size": 64,
        "image_size": 32, "patch_size": 8, "vision_output_dim": 64, "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1,
    }  # fmt: skip
    text = {**_TEXT, "num_key_value_heads": 2, "num_hidden_layers": 3, "cross_attention_layers": [1], "pad_token_id": 0}
    return t.MllamaForConditionalGeneration(
        t.MllamaConfig(text_config=text, vision_config=vision, image_token_index=300)
    )


def _kosmos(t: Any) -> Any:
    text = {
        "vocab_size": 320,
        "embed_dim": 32,
        "layers": 2,
        "ffn_dim": 64,
        "attention_heads": 4,
        "max_position_embeddings": 256,
    }
    return t.Kosmos2ForConditionalGeneration(
        t.Kosmos2Config(text_config=text, vision_config=_VISION, latent_query_num=4)
    )


def _glm(t: Any) -> Any:
    text = {
        **_TEXT, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "image_size": 32, "intermediate_size": 64, "out_hidden_size": 32,
    }  # fmt: skip
    marks = (
        "image_token_id",
        "video_token_id",
        "image_start_token_id",
        "image_end_token_id",
        "video_start_token_id",
        "video_end_token_id",
    )
    config = t.Glm4vConfig(text_config=text, vision_config=vision, **{k: 300 + i for i, k in enumerate(marks)})
    return t.Glm4vForConditionalGeneration(config)


def _granite_speech(t: Any) -> Any:
    encoder = {
        "input_dim": 16, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 4, "dim_head": 8, "output_dim": 42,
        "context_size": 16, "max_pos_emb": 16,
    }  # fmt: skip
    config = t.GraniteSpeechConfig(
        text_config={**_TEXT, "num_key_value_heads": 2, "model_type": "granite"}, encoder_config=encoder, audio_token_index=300,
        projector_config={**_TEXT, "encoder_hidden_size": 32, "model_type": "blip_2_qformer"},
    )  # fmt: skip
    return t.GraniteSpeechForConditionalGeneration(config)


def _instructblip(t: Any) -> Any:
    text = {
        "model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320,
        "word_embed_proj_dim": 32, "max_position_embeddings": 256,
    }  # fmt: skip
    config = t.InstructBlipConfig(
        vision_config=_VISION, qformer_config={**_TEXT, "encoder_hidden_size": 32}, text_config=text, num_query_tokens=4,
        image_token_index=300,
    )  # fmt: skip
    return t.InstructBlipForConditionalGeneration(config)


def _instructblip_video(t: Any) -> Any:
    config = t.InstructBlipVideoConfig(**_instructblip(t).config.to_dict() | {"video_token_index": 300})
    return t.InstructBlipVideoForConditionalGeneration(config)


def _idefics(t: Any) -> Any:
    vision = {
        "embed_dim": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    config = t.IdeficsConfig(**_TEXT, vision_config=vision, cross_layer_interval=1, use_resampler=False)
    return t.IdeficsForVisionText2Text(config)


def _series(t: Any, name: str) -> Any:
    if name == "PatchTST":
        config = t.PatchTSTConfig(
            num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, d_model=32, num_hidden_layers=2,
            num_attention_heads=4, ffn_dim=64, prediction_length=8,
        )  # fmt: skip
        return t.PatchTSTForPrediction(config)
    if name == "Informer":
        return t.InformerModel(
            t.InformerConfig(
                prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=2, d_model=32, encoder_layers=2,
                decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
            )
        )  # fmt: skip
    return t.DecisionTransformerModel(
        t.DecisionTransformerConfig(state_dim=5, act_dim=3, max_ep_len=64, hidden_size=32, n_layer=2, n_head=4)
    )


def _bros(t: Any) -> Any:
    return t.BrosModel(t.BrosConfig(**_TEXT | {"hidden_size": 64}, max_position_embeddings=128, dim_bbox=8))


def _udop(t: Any) -> Any:
    sizes = {
        "vocab_size": 320,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    return t.UdopForConditionalGeneration(t.UdopConfig(**sizes, decoder_start_token_id=0))


def _splinter(t: Any) -> Any:
    return t.SplinterForQuestionAnswering(t.SplinterConfig(**_TEXT, max_position_embeddings=128, question_token_id=104))


def _xmod(t: Any) -> Any:
    return t.XmodForMaskedLM(t.XmodConfig(**_TEXT, max_position_embeddings=130, languages=("en_XX", "de_DE")))


def _lxmert(t: Any) -> Any:
    sizes = {k: v for k, v in _TEXT.items() if k != "num_hidden_layers"}
    return t.LxmertModel(t.LxmertConfig(**sizes, l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=16))


def _kyutai(t: Any) -> Any:
    config = t.KyutaiSpeechToTextConfig(
        **_TEXT, head_dim=8, ffn_dim=64, codebook_vocab_size=64, num_codebooks=3, max_position_embeddings=128, audio_bos_token_id=63,
        audio_pad_token_id=62, pad_token_id=3, bos_token_id=2,
    )  # fmt: skip
    return t.KyutaiSpeechToTextModel(config)


def _dia(t: Any) -> Any:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    decoder = {
        **sizes,
        "cross_hidden_size": 32,
        "cross_num_attention_heads": 4,
        "cross_num_key_value_heads": 4,
        "cross_head_dim": 8,
        "num_channels": 3,
        "vocab_size": 64,
    }
    marks = {"pad_token_id": 62, "eos_token_id": 61, "bos_token_id": 63}
    config = t.DiaConfig(
        encoder_config={**sizes, "num_key_value_heads": 4}, decoder_config=decoder, delay_pattern=[0, 1, 2], **marks
    )
    return t.DiaForConditionalGeneration(config)


def _vision_tower(t: Any) -> Any:
    from transformers.models.qwen3_vl import modeling_qwen3_vl as module

    config = module.Qwen3VLVisionConfig(
        depth=2, hidden_size=32, num_heads=4, patch_size=4, intermediate_size=64, out_hidden_size=32, deepstack_visual_indexes=[0],
        num_position_embeddings=16,
    )  # fmt: skip
    return module.Qwen3VLVisionModel(config)


def _two_vocabularies(t: Any) -> Any:
    encoder = t.BertConfig(**_TEXT)
    decoder = t.BertConfig(**{**_TEXT, "vocab_size": 40}, is_decoder=True, add_cross_attention=True)
    config = t.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id = config.pad_token_id = 0
    return t.EncoderDecoderModel(config)


MODELS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "several codebooks": (_musicgen, ["text"]),
    "two vocabularies": (_two_vocabularies, ["text"]),
    "speech written in a voice": (lambda t: t.SpeechT5ForTextToSpeech(t.SpeechT5Config(**_SPEECH)), ["text"]),
    "patches with their places": (_pix2struct, ["image"]),
    "spectrogram": (_spectrogram, ["audio"]),
    "sixteen tokens of text": (_owlvit, ["image"]),
    "forty tokens of text": (_vilt, ["image"]),
    "tiles": (_mllama, ["text", "image"]),
    "words that a picture takes the place of": (_kosmos, ["image"]),
    "frames between marks of pictures": (_glm, ["text", "image", "video"]),
    "bands last": (_granite_speech, ["text", "audio"]),
    "a question beside the picture": (_instructblip, ["image"]),
    "a video among pixel values": (_instructblip_video, ["image"]),
    "pictures that each word looks at": (_idefics, ["image"]),
    "boxes as shares of a page": (_udop, ["text", "image"]),
    "a question that has to end": (_splinter, ["text"]),
    "a language": (_xmod, ["text"]),
    "boxes around words": (_bros, ["text"]),
    "regions of a picture": (_lxmert, ["text"]),
    "a text and codes beside it": (_kyutai, ["text"]),
    "codes side by side in the decoder": (_dia, ["text"]),
    "a vision part by itself": (_vision_tower, ["image"]),
    "series": (partial(_series, name="PatchTST"), ["series"]),
    "series and what is known of its times": (partial(_series, name="Informer"), ["series"]),
    "steps of a game": (partial(_series, name="Decision"), ["series"]),
}


def saved(model: Any, folder: Path) -> Path:
    """As if trained: no weight left at the zero or the one that it starts with."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and tensor.dim() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            torch.nn.init.normal_(tensor, std=0.02)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", MODELS)
def test_what_a_model_needs_besides_is_made(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, wanted = MODELS[kind]
    result = run(saved(make(transformers), tmp_path))
    assert result.forward is not None
    assert [r["kind"] for r in result.forward["runs"] if r["status"] == "ran" and r["finite"]] == wanted
    assert result.findings == ()


def test_text_without_the_picture_that_must_be_there_is_no_fault(tmp_path: Path) -> None:
    """ViLT raises "You have to specify either pixel_values or image_embeds": a word about the input, not about the weights."""
    result = run(saved(_vilt(transformers), tmp_path), modalities=("text",), values=False)
    assert result.forward is not None
    assert [(r["kind"], r["status"]) for r in result.forward["runs"]] == [("text", "not_run")]
    assert "pixel_values" in result.forward["runs"][0]["reason"]
    assert result.findings == ()
    assert {s.check for s in result.skips} >= {"CK602", "CK603"}


def test_computed_positions_are_the_same_in_both_halves(tmp_path: Path) -> None:
    model = transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(**_BART))
    result = run(saved(model, tmp_path), forward=False)
    assert result.observed is not None
    assert any("embed_positions" in name for group in result.observed.equal for name in group)
    assert result.findings == ()


# --- processors


def words(**more: Any) -> Any:
    """A tokenizer of one token for each letter: the longest ids that a text can become."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = {c: i + 4 for i, c in enumerate("abcdefghijklmnopqrstuvwxyzTD.,")}
    raw = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **letters}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", **more)


def origin(folder: Path) -> list[tuple[str, str, str | None, str | None]]:
    result = run(folder, values=False)
    assert result.forward is not None
    assert result.findings == ()
    return [(r["kind"], r["status"], r["inputs_from"], r["reason"]) for r in result.forward["runs"]]


def test_a_tokenizers_text_comes_with_what_the_decoder_needs(tmp_path: Path) -> None:
    words().save_pretrained(tiny_models.save("t5", tmp_path))
    assert origin(tmp_path) == [("text", "ran", "processor", None)]


@pytest.mark.parametrize(
    ("build", "room"),
    [
        # RoBERTa's first position is the one behind the padding's id, 1: of 130 rows 128 are for words.
        (lambda t: t.RobertaForMaskedLM(t.RobertaConfig(**_TEXT, max_position_embeddings=130)), 128),
        (lambda t: t.BertForMaskedLM(t.BertConfig(**_TEXT, max_position_embeddings=130)), 130),
        (lambda t: t.BartForConditionalGeneration(t.BartConfig(**_BART)), 128),  # a table of 130 rows, the first two for nothing
        (lambda t: t.MptForCausalLM(t.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=320, max_seq_len=100)), 100),
    ],
)  # fmt: skip
def test_a_text_is_no_longer_than_the_positions_that_a_model_has(build: Any, room: int, tmp_path: Path) -> None:
    result = run(saved(build(transformers), tmp_path), values=False, tokens=200)
    assert result.forward is not None
    assert [(r["status"], r["inputs"]["input_ids"][1]) for r in result.forward["runs"]] == [("ran", room)]
    assert result.findings == ()


def test_the_processor_of_a_pair_of_encoders_keeps_to_the_room_for_text(tmp_path: Path) -> None:
    """CLIP has positions for 77 tokens and no placeholder: a processor's text is cut to fit, as its users' is."""
    words().save_pretrained(tiny_models.save("clip", tmp_path))
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    transformers.CLIPImageProcessor(**sizes).save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    assert origin(tmp_path) == [("image", "ran", "processor", None)]


@pytest.mark.parametrize("kind", ["vit", "whisper"])
def test_a_processor_without_words(kind: str, tmp_path: Path) -> None:
    tiny_models.save(kind, tmp_path)
    if kind == "vit":
        transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    else:  # 64 frames for 32 positions
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=250).save_pretrained(tmp_path)
    assert origin(tmp_path) == [({"vit": "image", "whisper": "audio"}[kind], "ran", "processor", None)]


def test_a_processor_of_frames(tmp_path: Path) -> None:
    """A model of videos that calls them pixel values, and whose processor is for images: it gets as many as it has frames."""
    model = transformers.VideoMAEForVideoClassification(transformers.VideoMAEConfig(**_VISION, num_frames=4))
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    transformers.VideoMAEImageProcessor(**sizes).save_pretrained(saved(model, tmp_path))
    assert origin(tmp_path) == [("image", "ran", "processor", None)]


def test_a_processor_without_words_whose_pictures_do_not_fit(tmp_path: Path) -> None:
    tiny_models.save("vit", tmp_path)
    transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path)
    (found,) = run(tmp_path, values=False).findings
    assert (found.check, found.blame) == ("CK602", "config")
    assert "image input from the repo's processor" in found.message


# --- what comes out


class _Masks(torch.nn.Module):
    """Scores of four words, of which a mask lets two through; `over` puts Inf into the weight of the scores."""

    def __init__(self, *, over: float = 0.0) -> None:
        super().__init__()
        self.scores = torch.nn.Linear(2, 4, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))  # of its own, beside a part
        with torch.no_grad():
            self.scores.weight[0] -= over

    def forward(self, words: Any) -> Any:
        return (self.scores(words) * self.scale).masked_fill(torch.tensor([False, False, True, True]), -torch.inf)


@pytest.mark.parametrize(("over", "found"), [(0.0, None), (torch.inf, "scores")])
def test_inf_below_zero_is_a_mask_unless_a_weight_gives_it(over: float, found: str | None) -> None:
    """-Inf times a positive input is -Inf alone, as a mask is: which of both it was, the module tells that gave it first."""
    model, probe = _Masks(over=over), Probe()
    with torch.no_grad(), probe.on(model):
        output = model(torch.ones(1, 2))
    assert bool(torch.isneginf(output).any())
    first = probe.first()
    assert (first and first.module) == found


@pytest.mark.parametrize(
    ("output", "masked", "finite"),
    [
        ([0.5, -math.inf], True, True),
        ([0.5, -math.inf], False, False),  # a weight gave it
        ([0.5, math.inf], True, False),
        ([0.5, math.nan], True, False),
        ([-math.inf, -math.inf], True, False),  # nothing is left
    ],
)
def test_what_counts_as_a_finite_output(output: list[float], masked: bool, finite: bool) -> None:
    assert forward.outputs({"logits": torch.tensor([output])}, masked=masked) == ({"logits": [1, 2]}, finite)


def test_a_tokenizer_beside_an_image_processor_makes_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What AutoProcessor gives for a captioner without a processor class: its tokenizer, which swallows pictures."""
    words_alone = words()

    class Swallows:
        chat_template = None
        image_token = "<image>"

        def __call__(self, *, text: str, return_tensors: str, **_media: Any) -> Any:
            return words_alone(text, return_tensors=return_tensors)

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda *_args, **_more: Swallows())
    processed._processor.cache_clear()
    with pytest.raises(ValueError, match="nothing of image input"):
        processed.make("captioner", "image", 64, 0, trust_remote_code=False)
    assert "input_ids" in processed.make("captioner", "text", 64, 0, trust_remote_code=False)
    processed._processor.cache_clear()


def test_outputs_of_one_byte_are_looked_at() -> None:
    model = torch.nn.Sequential(torch.nn.Identity())
    probe = Probe()
    bad = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    with probe.on(model):
        model(bad)
    culprit = probe.first()
    assert culprit is not None
    assert culprit.nan


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("GPU is required to run SpQR quantized model.", True),
        ("HIGGS quantization is only supported on GPU. Please use a different quantizer.", True),
        ("You set `ignore_mismatched_sizes` to `False`, thus raising an error.", False),
    ],
)
def test_a_quantiser_that_wants_another_device(said: str, wanted: bool) -> None:
    assert wants_device(RuntimeError(said)) is wanted


def test_integers_that_an_operation_refuses_are_no_dtype_of_the_model() -> None:
    assert no_kernel(RuntimeError("\"LayerNormKernelImpl\" not implemented for 'Half'"))
    assert not no_kernel(RuntimeError("\"LayerNormKernelImpl\" not implemented for 'Long'"))
