"""What every variant starts from: the corpus, a tokenizer trained on it, and one file of initial weights."""

from pathlib import Path

import torch

from bench.demo.sizes import Sizes
from octavo.models import Decoder, save_model, train_bpe
from octavo.models.initial import STD
from octavo.run.build import build_model_config
from octavo.run.sections import ModelSection, OptimizerSection
from octavo.train.config import CheckpointSection, MetricsSection, RunSection, ScheduleSection, TrainConfig
from octavo.train.corpus import read_documents, read_split
from octavo.train.tokens import TokenizedText, first_bytes, load_text


def prepare_start(sizes: Sizes, out: Path, seed: int, device: str) -> tuple[TrainConfig, TokenizedText]:
    """Train the tokenizer, write the initial model to out/start, tokenize the corpus into out/cache.

    Returns:
        (the config of all variants but for precision, steps and directory; the text).
    """
    data = sizes.data.model_copy(update={"cache_dir": out / "cache"})
    documents = read_split(data, "train", read_documents)
    tokenizer = train_bpe(first_bytes(documents, data.tokenizer_bytes), data.vocab_size)
    architecture = build_model_config(sizes.model, tokenizer.vocab_size, tokenizer.eos_id, data.seq_len)
    model = Decoder(architecture, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(sizes.init_std / STD)
    save_model(model, out / "start", tokenizer=tokenizer)
    config = TrainConfig(
        model=ModelSection(path=str(out / "start")),
        data=data,
        optimizer=OptimizerSection(lr=sizes.lr),
        schedule=ScheduleSection(warmup_steps=0),
        checkpoint=CheckpointSection(every=0, keep=1),
        metrics=MetricsSection(eval_every=0, eval_tokens=sizes.eval_tokens, tensorboard=False),
        run=RunSection(seed=seed, device=device),
    )
    return config, load_text(data, config.model.path)
