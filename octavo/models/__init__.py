"""One decoder for train, serve and rl; its configs, families, checkpoints and tokenizers."""

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.load import load_model
from octavo.models.perplexity import perplexity
from octavo.models.quantize import CalibrationText, QuantizationReport, quantize_checkpoint
from octavo.models.save import save_model
from octavo.models.scoring import sequence_logprobs
from octavo.models.stream_decoder import StreamDecoder
from octavo.models.tokenizer import Tokenizer, char_tokenizer, load_tokenizer, train_bpe

__all__ = [
    "CalibrationText",
    "Decoder",
    "ModelConfig",
    "QuantizationReport",
    "StreamDecoder",
    "Tokenizer",
    "char_tokenizer",
    "load_model",
    "load_tokenizer",
    "perplexity",
    "quantize_checkpoint",
    "save_model",
    "sequence_logprobs",
    "train_bpe",
]
