"""Models: LongNet and its language models, an encoder for pathology slides, and the checkpoints of both."""

from .adaptive_checkpoints import AdaptiveLayer, load_adaptive, save_adaptive
from .checkpoints import (
    export_state,
    from_transformer_encoder,
    load_checkpoint,
    load_slide_encoder,
    load_torchscale,
    read_state,
    write_state,
)
from .config import LongNetConfig
from .layers import DilatedTransformerDecoderLayer, DilatedTransformerEncoderLayer
from .longnet import LongNet, LongNetLM
from .slide import SlideConfig, SlideEncoder

__all__ = [
    "AdaptiveLayer",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "LongNet",
    "LongNetConfig",
    "LongNetLM",
    "SlideConfig",
    "SlideEncoder",
    "export_state",
    "from_transformer_encoder",
    "load_adaptive",
    "load_checkpoint",
    "load_slide_encoder",
    "load_torchscale",
    "read_state",
    "save_adaptive",
    "write_state",
]
