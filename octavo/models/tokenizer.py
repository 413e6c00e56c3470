"""Text to token ids and back over the `tokenizers` library: local tokenizer files, or tokenizers made on the spot."""

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo.errors import BackendError, CheckpointError, ConfigError, DataError, install_extra
from octavo.models.checkpoint.dialects import newest_model

EOS_TOKEN = "<|endoftext|>"
_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no UTF-8, or not yet
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how tokenizers with byte fallback spell a byte


def _byte_alphabet() -> dict[str, int]:
    """How byte-level tokenizers spell bytes: one that prints as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _spelled_bytes(token: str) -> bytes | None:
    """What a token of a byte-level vocabulary spells; None for plain text, which one that was added may be."""
    return bytes(map(_BYTE_OF.__getitem__, token)) if all(char in _BYTE_OF for char in token) else None


class Tokenizer:
    """A tokenizer with a known end-of-sequence id.

    Args:
        backend: the `tokenizers` object that does the work.
        eos_id: the id that ends a document, or None where there is none.
        bos_token: the text of the token that begins one, or None.
        chat_template: Jinja text that turns messages into a prompt, as Hugging Face has it, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_id: int | None = None,
        *,
        bos_token: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.eos_id = eos_id
        self.bos_token = bos_token
        self.chat_template = chat_template
        self._texts: dict[int, str] = {}  # of single tokens, as far as they were asked for

    @property
    def eos_token(self) -> str | None:
        """The text of eos_id's token."""
        return None if self.eos_id is None else str(self.backend.id_to_token(self.eos_id))

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that stand for one token each and are no text of a person's."""
        added = self.backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special_tokens."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def eos_token_id(self) -> int | None:
        """eos_id under Hugging Face's name."""
        return self.eos_id

    @functools.cached_property
    def vocab_size(self) -> int:
        """One past the largest id, special tokens included: the least vocab_size of a model."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: let the tokenizer file add its own (a BOS token, say). An empty text that would then
                have none is the BOS token, where there is one.
        Raises:
            DataError: the text holds a character that this tokenizer has no token for.
        """
        ids = self.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        if text or ids or not add_special_tokens or self.bos_token is None:
            return ids
        bos_id = self.backend.token_to_id(self.bos_token)
        return [] if bos_id is None else [bos_id]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Token ids of many texts at once, in parallel; see encode."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except Exception as error:  # the library has no narrower type
            raise DataError(self._explain(texts, error)) from error
        return [encoding.ids for encoding in encodings]

    def _explain(self, texts: Sequence[str], error: Exception) -> str:
        unknown = sorted({char for text in texts for char in text} - set(self.backend.get_vocab()))
        if isinstance(self.backend.model, models.WordLevel) and unknown:
            named = ", ".join(map(repr, unknown[:5]))
            return f"the text holds characters outside the tokenizer's alphabet: {named}; remove them or add them to it"
        return f"the text cannot be tokenized: {error}"

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        Ids from vocab_size on have no text: a model's vocabulary is often padded beyond its tokenizer's.

        Raises:
            DataError: a negative id.
        """
        ids = [int(i) for i in ids]
        if ids and min(ids) < 0:
            raise DataError(f"token ids must be at least 0, got {min(ids)}")
        return self.backend.decode([i for i in ids if i < self.vocab_size], skip_special_tokens=skip_special_tokens)

    def text_of(self, token_id: int) -> str:
        """One token's text, a special token's too; "" for an id that has none, U+FFFD for a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which may be a part of a character's UTF-8."""
        text = self.text_of(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        token = str(self.backend.id_to_token(token_id))
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        spelled = _spelled_bytes(token)
        return text.encode() if spelled is None else spelled

    def is_byte(self, token_id: int) -> bool:
        """Whether a token is spelled as byte fallback spells one byte."""
        return _BYTE_TOKEN.fullmatch(str(self.backend.id_to_token(token_id))) is not None

    @functools.cached_property
    def utf8_by_token(self) -> "_TokenUtf8 | None":
        """Each token's bytes where a text's are those of its tokens, joined; None where a token's neighbours matter."""
        return _TokenUtf8(self.backend) if isinstance(self.backend.decoder, decoders.ByteLevel) else None

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers reads too, into a directory."""
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        fields: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token, "chat_template": self.chat_template}
        fields |= {key: value for key, value in named.items() if value is not None}
        (directory / _FILE).write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        (directory / _CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as text by the tokenizer's own chat template, through transformers.

        Args:
            messages: {"role", "content"} and whatever else the template reads.
            add_generation_prompt: end with what comes before an answer of the assistant.
            template_kwargs: further variables of the template.
        Raises:
            BackendError: transformers is not installed.
            DataError: there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise DataError(
                "this tokenizer has no chat template; give a plain prompt, or a template: data.chat_template in a "
                "training recipe, chat_template.jinja beside a checkpoint"
            )
        try:
            text = self.as_transformers.apply_chat_template(
                list(messages),
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template raises whatever its author chose
            raise DataError(f"the chat template refuses these messages: {error}") from error
        return str(text)

    def prepare_chat(self) -> None:
        """Load what render_chat needs; else the first call does. Errors as render_chat."""
        if self.chat_template is not None:
            _ = self.as_transformers

    @functools.cached_property
    def as_transformers(self) -> Any:
        """This tokenizer as transformers' PreTrainedTokenizerFast, with the chat template that it had at first.

        Raises:
            BackendError: transformers is not installed.
        """
        if importlib.util.find_spec("transformers") is None:
            raise BackendError(f"a checkpoint's own chat template needs transformers; {install_extra('hf')}")
        from transformers import PreTrainedTokenizerFast  # two seconds to import: only where it is wanted

        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token, "chat_template": self.chat_template}
        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend,
            **{key: token for key, token in tokens.items() if token is not None},
        )


class _TokenUtf8(dict[int, bytes]):
    """What a byte-level decoder makes of a token, by id; each is looked up once. Unknown ids have no bytes."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        spelled = _spelled_bytes(token)
        self[token_id] = found = token.encode() if spelled is None else spelled
        return found


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE: any text can be encoded, and decoding gives it back unchanged.

    Args:
        texts: training documents; read once.
        vocab_size: tokens in all, with the 256 bytes and the end-of-sequence token (so at least 257). Little text
            may give fewer.
    Returns:
        A tokenizer whose eos_id is 0. The same texts give the same tokenizer.
    Raises:
        ConfigError: a vocab_size below 257.
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size must be at least 257 (256 bytes and {EOS_TOKEN}), got {vocab_size}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, eos_id=backend.token_to_id(EOS_TOKEN))


def char_tokenizer(alphabet: str) -> Tokenizer:
    """One token a character.

    Args:
        alphabet: the characters, in the order of their ids, which start at 1.
    Returns:
        A tokenizer whose eos_id is 0; other characters are a DataError.
    Raises:
        ConfigError: an empty alphabet, or a character that comes twice.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ConfigError(f"an alphabet needs at least one character and each only once, got {alphabet!r}")
    vocab = {token: i for i, token in enumerate([EOS_TOKEN, *alphabet])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([EOS_TOKEN])
    return Tokenizer(backend, eos_id=0)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json from the disk.

    Args:
        path: the file, or a directory that holds it, or that of a training run or step: its newest model. Never a name
            on a hub: octavo downloads nothing.
    Returns:
        The tokenizer; eos_id comes from tokenizer_config.json or config.json beside it, else from EOS_TOKEN.
    Raises:
        CheckpointError: there is no such file, or it is no tokenizer.
    """
    file = newest_model(Path(path)) / _FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise CheckpointError(
            f"{path}: no {_FILE} there; give a local {_FILE} or a directory that holds one (names on a hub are not "
            "looked up: download the files first)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no narrower type
        raise CheckpointError(f"{file}: not a tokenizer file: {error}") from error
    backend.no_truncation()  # of the batches that were tokenized before it was saved
    backend.no_padding()
    fields = _read_json(file.parent / _CONFIG)
    return Tokenizer(
        backend,
        eos_id=_find_eos(backend, file.parent),
        bos_token=_token_text(fields.get("bos_token")),
        chat_template=_find_chat_template(fields, file.parent),
    )


def _find_eos(backend: tokenizers.Tokenizer, directory: Path) -> int | None:
    token = _token_text(_read_json(directory / _CONFIG).get("eos_token"))
    if token is not None:
        named: int | None = backend.token_to_id(token)
        if named is None:
            raise CheckpointError(f"{directory / _CONFIG}: eos_token {token!r} is not in the vocabulary")
        return named
    ids = _read_json(directory / "config.json").get("eos_token_id")
    first = ids[0] if isinstance(ids, list) and ids else ids
    return first if isinstance(first, int) else backend.token_to_id(EOS_TOKEN)


def _token_text(token: Any) -> str | None:
    """A special token as tokenizer_config.json has it: text, or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return None if text is None else str(text)


def _find_chat_template(fields: dict[str, Any], directory: Path) -> str | None:
    """The default template: in a file of its own, or in tokenizer_config.json, alone or among named ones."""
    file = directory / _TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = fields.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    return fields if isinstance(fields, dict) else {}


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """16 hex digits of how a tokenizer cuts text."""
    return hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest()[:16]
