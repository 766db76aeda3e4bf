"""Networks of other libraries with random weights, a factory each, as a user writes it.

A copy of this file is the SOURCE of an export, so it imports nothing of ours.
"""

from __future__ import annotations

import torch


def yolo() -> torch.nn.Module:
    from ultralytics.nn.tasks import DetectionModel

    torch.manual_seed(0)
    return DetectionModel("yolov8n.yaml", nc=3, verbose=False)


def wrapped_segmenter() -> object:
    """As `YOLO("best.pt")`: an object around the network, whose call is `predict()`."""
    from ultralytics import YOLO

    torch.manual_seed(0)
    made = YOLO("yolo11n-seg.yaml")
    for branch in made.model.model[-1].cv3:  # untrained ones score hardly above 0
        branch[-1].bias.data.fill_(-2.0)
    return made


def oriented() -> torch.nn.Module:
    from ultralytics.nn.tasks import OBBModel

    return OBBModel("yolo11n-obb.yaml", nc=3, verbose=False)


def unet() -> torch.nn.Module:
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    return smp.Unet("resnet18", encoder_weights=None, classes=3)


def detr() -> torch.nn.Module:
    """Three classes, and the one that stands for no object."""
    from transformers import DetrConfig, DetrForObjectDetection

    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 20, "num_labels": 3}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    own = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    return DetrForObjectDetection(DetrConfig(backbone_config=_resnet("stage4"), **own, **sizes, **layers))


def rtdetr() -> torch.nn.Module:
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    torch.manual_seed(0)
    channels = [16, 32, 64, 128]
    backbone = RTDetrResNetConfig(
        hidden_sizes=channels, depths=[1] * 4, embedding_size=16, out_features=["stage2", "stage3", "stage4"]
    )
    sizes = {"encoder_hidden_dim": 32, "d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_labels": 3}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 1, "num_queries": 20}
    maps = {"encoder_in_channels": channels[1:], "decoder_in_channels": [32] * 3}
    network = RTDetrForObjectDetection(
        RTDetrConfig(backbone_config=backbone, use_pretrained_backbone=False, **maps, **sizes, **heads)
    )
    # As transformers draws them, all places have the same score, and which become queries is up to the sort.
    for weights in network.parameters():
        if weights.ndim > 1:
            torch.nn.init.kaiming_normal_(weights)
    torch.nn.init.normal_(network.model.enc_score_head.weight, std=10.0)
    return network


def _resnet(last: str) -> object:
    from transformers import ResNetConfig

    return ResNetConfig(hidden_sizes=[16, 32, 64, 128], depths=[1] * 4, embedding_size=16, out_features=[last])


def fcos() -> torch.nn.Module:
    from torchvision.models.detection import fcos_resnet50_fpn

    torch.manual_seed(0)
    return fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=4)


def two_stages() -> torch.nn.Module:
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    torch.manual_seed(0)
    return fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=4)
