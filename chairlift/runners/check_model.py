"""Refusing a model folder by its config.json: within milliseconds, without torch, and before any worker starts."""

from pathlib import Path

from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.folders.kind import check_reads
from chairlift.folders.model_json import read_model_json
from chairlift.folders.multimodal import is_native
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.runners.decoder.config import DecoderConfig, max_length, parse_config, read_any_config
from chairlift.runners.encoder.config import EncoderConfig, check_logit_score, read_encoder_config


def check_model(config: SequenceConfig | ItemConfig) -> None:
    """Raise ConfigError or UnsupportedModel for a folder that its runner would refuse as soon as it looked at it."""
    folder = Path(config.model)
    if isinstance(config, SequenceConfig):
        max_length(config.max_model_len, read_any_config(folder, config.implementation))
    elif config.kind == "encoder":
        raw = read_model_json(folder)
        found: EncoderConfig | DecoderConfig
        if is_native(raw):
            check_reads(raw)
            found = parse_config(raw)
        else:
            found = read_encoder_config(folder)
        files = SentenceFiles.read(folder)
        check_logit_score(files.logit_score, found)
        files.width(found.hidden_size)
