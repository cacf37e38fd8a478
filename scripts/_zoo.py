"""The networks of collections, with random weights: torchvision's, timm's, and small ones of the architectures of
transformers. Nothing is downloaded.

Every network is a module from tensors to tensors. It is given images of about the size that is asked for, if its images
may have any size.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hago import HagoError

#: Sides of images that are tried after the one that is asked for.
SIDES = (128, 224, 240, 256, 299)


class TensorOutputs(nn.Module):
    """A network of which only the floating-point tensors among its outputs are returned.

    Args:
        network: returns tensors, or containers of tensors and other values.
        names: names of the arguments that get the input; without names it is passed by position.
        fixed: further arguments.
    """

    def __init__(self, network: nn.Module, names: Sequence[str] = (), fixed: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.network = network
        self.names = tuple(names)
        self.fixed = dict(fixed or {})

    def forward(self, first: Tensor) -> Any:
        """The floating-point tensors of the outputs."""
        given = dict.fromkeys(self.names, first)
        outputs = self.network(**given, **self.fixed) if given else self.network(first, **self.fixed)
        tensors = tuple(_tensors(outputs))
        return tensors[0] if len(tensors) == 1 else tensors


class EncoderDecoder(nn.Module):
    """An encoder and a decoder that read the same tokens."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Any:
        """The output of the decoder."""
        return self.network(input_ids=tokens, decoder_input_ids=tokens, use_cache=False)[0]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [t for part in parts for t in _tensors(part)]


@dataclass(frozen=True)
class Collection:
    """Networks by name.

    Args:
        names: of all its networks.
        make: makes a network from its name and the side of its images.
        families: one name of each family.
        inputs: makes the inputs of a network from its name, a number of samples and the side of images; None for random
            images.
    """

    names: Sequence[str]
    make: Callable[[str, int], nn.Module]
    families: Sequence[str]
    inputs: Callable[[str, int, int], Tensor] | None = None

    def network(self, name: str, side: int) -> nn.Module:
        """A network in eval mode, whose parameters all have an effect."""
        return with_effective_parameters(self.make(name, side))

    def samples(self, name: str, network: nn.Module, count: int, side: int) -> Tensor:
        """Inputs of the network: random images of the given size, or of the first of SIDES that it accepts.

        Raises:
            HagoError: it accepts none of them.
        """
        if self.inputs is not None:
            return self.inputs(name, count, side)
        why = ""
        for tried in (side, *SIDES):
            shape = (3, 8, tried, tried) if name in VIDEO else (3, tried, tried)
            images = torch.randn(count, *shape)
            try:
                with torch.no_grad():
                    network(images[:2])
                return images
            except (RuntimeError, AssertionError, ValueError) as error:
                why = str(error).partition("\n")[0]
        raise HagoError(f"takes no images of the sizes that were tried: {why}")


def with_effective_parameters(network: nn.Module) -> nn.Module:
    """Give random values to parameters that are initialized so that they have no effect, and set the eval mode.

    These are batch norms, heads whose weights are 0, and tokens and positions near 0, which become as large as patches.
    A norm of a token that is nearly 0 would amplify its rounding error: DeiT would have 9 dB on this token, and has
    33 dB on all others.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear) and not bool(module.weight.any()):
            nn.init.trunc_normal_(module.weight, std=0.02)
    for tensor in network.parameters():
        if tensor.ndim == 3 and len(tensor) == 1 and float(tensor.detach().abs().mean()) < 0.1:
            nn.init.normal_(tensor, std=0.5)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return network.eval()


#: Networks whose usual initialization of weights would take minutes.
INITIAL = {"googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}}
#: Networks that read videos.
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18")
#: Networks whose outputs are for every pixel, or are boxes for anchors.
SEGMENTATION = ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50")
DETECTION = ("ssdlite320_mobilenet_v3_large",)
TORCHVISION = (
    "alexnet", "vgg11_bn", "resnet18", "squeezenet1_1", "densenet121", "googlenet", "inception_v3",
    "shufflenet_v2_x0_5", "mobilenet_v2", "mobilenet_v3_small", "resnext50_32x4d", "mnasnet0_5", "regnet_y_400mf",
    "efficientnet_b0", "convnext_tiny", "vit_b_32", "swin_t", "swin_v2_t", "maxvit_t", "r3d_18", *SEGMENTATION,
    *DETECTION,
)  # fmt: skip


class DetectorHeads(nn.Module):
    """The backbone and the head of a detector, without its preparation of images and its selection of boxes."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images: Tensor) -> Any:
        """Logits and boxes relative to anchors."""
        outputs = self.head(list(self.backbone(images).values()))
        return outputs["cls_logits"], outputs["bbox_regression"]


def torchvision() -> Collection:
    """The networks of torchvision, without trained weights."""
    _declare_operators()
    models: Any = importlib.import_module("torchvision.models")

    def make(name: str, side: int) -> nn.Module:
        options: dict[str, Any] = dict(INITIAL.get(name, {}))
        if name in SEGMENTATION or name in DETECTION:
            options["weights_backbone"] = None
        network: nn.Module = models.get_model(name, weights=None, **options)
        if name in DETECTION:
            return DetectorHeads(network)
        return TensorOutputs(network) if name in SEGMENTATION else network

    known = models.list_models(module=models)
    return Collection([*known, *(n for n in TORCHVISION if n not in known)], make, TORCHVISION)


def _declare_operators() -> None:
    """Declare torchvision's own operators if its build is for another torch, so that it can be imported.

    Networks that use these operators cannot run then; all others can.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        for name in [n for n in sys.modules if n.startswith("torchvision")]:
            del sys.modules[name]
        importlib.import_module("torchvision")


_KEPT: list[Any] = []

TIMM = (
    "resnetv2_18", "mobilenetv4_conv_small", "mobilenetv4_hybrid_medium", "fastvit_t8", "efficientvit_b0",
    "efficientvit_m0", "efficientformer_l1", "efficientformerv2_s0", "edgenext_xx_small", "mobilevit_xxs",
    "mobilevitv2_050", "mobileone_s0", "repvgg_a0", "ghostnet_050", "ghostnetv2_100", "levit_128s",
    "mixer_s32_224", "gmlp_ti16_224", "resmlp_12_224", "poolformer_s12", "nf_regnet_b0", "nf_resnet26",
    "coat_lite_tiny",
    "pit_ti_224", "deit_tiny_patch16_224", "vit_tiny_patch16_224", "beit_base_patch16_224", "cait_xxs24_224",
    "xcit_nano_12_p16_224", "twins_pcpvt_small", "pvt_v2_b0", "crossvit_tiny_240", "convit_tiny", "visformer_tiny",
    "hrnet_w18_small", "dla34", "dpn48b", "res2net50_14w_8s", "resnest14d", "skresnet18", "selecsls42", "tinynet_e",
    "tf_efficientnet_lite0", "tf_efficientnetv2_b0", "rexnet_100", "cspresnet50", "darknet17", "ese_vovnet19b_dw",
    "xception41", "gcresnet33ts", "botnet26t_256", "halonet26t", "lambda_resnet26t", "eca_halonext26ts", "seresnet18",
    "legacy_seresnet18", "focalnet_tiny_srf", "davit_tiny", "gcvit_xxtiny", "nextvit_small", "starnet_s1",
    "repghostnet_050", "repvit_m0_9", "tiny_vit_5m_224", "inception_next_atto", "sequencer2d_s", "hgnet_tiny",
    "hgnetv2_b0", "mambaout_femto", "swiftformer_xs", "convnextv2_atto", "convnext_atto", "eva02_tiny_patch14_224",
    "coatnet_nano_rw_224", "regnetz_005", "hardcorenas_a", "mixnet_s", "fbnetc_100", "spnasnet_100", "semnasnet_050",
    "lcnet_050", "mnasnet_small", "convmixer_768_32", "swinv2_cr_tiny_224", "hiera_tiny_224", "rdnet_tiny",
    "csatv2", "shvit_s1", "fasternet_t0", "mobilenet_edgetpu_100", "inception_v4", "volo_d1_224", "tnt_s_patch16_224",
)  # fmt: skip


def timm() -> Collection:
    """The networks that timm lists."""
    _declare_operators()
    package: Any = importlib.import_module("timm")
    known = package.list_models()

    def make(name: str, side: int) -> nn.Module:
        multiple = side // 32 * 32
        for options in ({"img_size": multiple}, {}):
            try:
                network: nn.Module = package.create_model(name, pretrained=False, **options)
                size = (multiple, multiple) if options else _default_size(network)
                with torch.no_grad():
                    network.eval()(torch.zeros(2, 3, *size))
                return network
            except (TypeError, RuntimeError, AssertionError, ValueError):
                if not options:
                    raise
        raise AssertionError(name)

    return Collection(known, make, [n for n in TIMM if n in known])


def _default_size(network: Any) -> tuple[int, int]:
    """The height and the width of the images that a network of timm was made for."""
    _, height, width = network.pretrained_cfg.get("input_size", (3, 224, 224))
    return height, width


#: The number of tokens of a sample, and the size of the vocabulary.
TOKENS, VOCAB = 16, 100
_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_IMAGE = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 64,
    "patch_size": 16,
}  # fmt: skip
_SPEECH = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": (16, 16),
    "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
#: By name: the class of the config, its options, and the class of the model; an empty name stands for AutoModel's.
TRANSFORMERS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "bert": ("BertConfig", _TEXT, ""),
    "roberta": ("RobertaConfig", {**_TEXT, "pad_token_id": 1}, ""),
    "distilbert": ("DistilBertConfig", {"vocab_size": VOCAB, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
                   ""),
    "electra": ("ElectraConfig", {**_TEXT, "embedding_size": 32}, ""),
    "deberta_v2": ("DebertaV2Config", {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, ""),
    "mobilebert": ("MobileBertConfig", {"vocab_size": VOCAB, "num_hidden_layers": 2}, ""),
    "albert": ("AlbertConfig", {**_TEXT, "embedding_size": 32}, ""),
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}, ""),
    "gpt_neox": ("GPTNeoXConfig", _TEXT, ""),
    "opt": ("OPTConfig", {**_TEXT, "ffn_dim": 96, "word_embed_proj_dim": 48, "pad_token_id": 1}, ""),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4}, ""),
    "phi": ("PhiConfig", _TEXT, ""),
    "llama": ("LlamaConfig", _GROUPED, "LlamaForCausalLM"),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 8}, ""),
    "qwen2": ("Qwen2Config", _GROUPED, ""),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 12}, ""),
    "gemma": ("GemmaConfig", {**_GROUPED, "head_dim": 12}, ""),
    "mamba": ("MambaConfig", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, ""),
    "t5": ("T5Config", {"vocab_size": VOCAB, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4},
           ""),
    "bart": ("BartConfig", {"vocab_size": VOCAB, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
             "max_position_embeddings": 64}, ""),
    "vit": ("ViTConfig", _IMAGE, ""),
    "deit": ("DeiTConfig", _IMAGE, ""),
    "dinov2": ("Dinov2Config", _IMAGE, ""),
    "beit": ("BeitConfig", _IMAGE, ""),
    "clip_vision": ("CLIPVisionConfig", _IMAGE, "CLIPVisionModel"),
    "siglip_vision": ("SiglipVisionConfig", _IMAGE, "SiglipVisionModel"),
    "swin": ("SwinConfig", {"image_size": 64, "patch_size": 4, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 4],
             "window_size": 4}, ""),
    "segformer": ("SegformerConfig", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48],
                  "decoder_hidden_size": 32}, "SegformerForSemanticSegmentation"),
    "convnext": ("ConvNextConfig", {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}, ""),
    "resnet": ("ResNetConfig", {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}, ""),
    "whisper_encoder": ("WhisperConfig", {"d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 4,
                        "encoder_ffn_dim": 96, "max_source_positions": 32, "num_mel_bins": 16, "decoder_layers": 1,
                        "decoder_attention_heads": 4, "decoder_ffn_dim": 96}, "WhisperModel"),
    "wav2vec2": ("Wav2Vec2Config", _SPEECH, ""),
    "hubert": ("HubertConfig", _SPEECH, ""),
}  # fmt: skip
_PIXELS = ("vit", "deit", "dinov2", "beit", "clip_vision", "siglip_vision", "swin", "segformer", "convnext", "resnet")
_SOUND = ("wav2vec2", "hubert")
_CACHED = ("gpt2", "gpt_neox", "opt", "bloom", "phi", "llama", "mistral", "qwen2", "qwen3", "gemma", "mamba")


def transformers() -> Collection:
    """Small networks of the architectures of transformers, made by their configs."""
    _declare_operators()
    package: Any = importlib.import_module("transformers")

    def make(name: str, side: int) -> nn.Module:
        config_class, options, model_class = TRANSFORMERS[name]
        config = getattr(package, config_class)(**options)
        config.return_dict = True
        network = getattr(package, model_class)(config) if model_class else package.AutoModel.from_config(config)
        if name == "whisper_encoder":
            return TensorOutputs(network.encoder, ["input_features"]).eval()
        if name in ("t5", "bart"):
            return EncoderDecoder(network.eval()).eval()
        read = "pixel_values" if name in _PIXELS else "input_values" if name in _SOUND else "input_ids"
        return TensorOutputs(network, [read], {"use_cache": False} if name in _CACHED else {}).eval()

    def inputs(name: str, count: int, side: int) -> Tensor:
        if name in _PIXELS:
            return torch.randn(count, 3, 64, 64)
        if name in _SOUND:
            return torch.randn(count, 800)
        if name == "whisper_encoder":
            return torch.randn(count, 16, 64)
        return torch.randint(3, VOCAB, (count, TOKENS))

    return Collection(tuple(TRANSFORMERS), make, tuple(TRANSFORMERS), inputs)


COLLECTIONS: Mapping[str, Callable[[], Collection]] = {
    "torchvision": functools.cache(torchvision),
    "timm": functools.cache(timm),
    "transformers": functools.cache(transformers),
}
