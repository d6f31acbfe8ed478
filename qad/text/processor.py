"""The processor of a model that also sees: its tokenizer and what makes pixel values of images, by Pillow on every machine.

What reads videos is left out: it needs torchvision, and no video is read here. No code of a folder is run.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from qad.artifact import digest_of, sha256_file
from qad.errors import SourceError, UsageError
from qad.model.built_config import quiet
from qad.model.loader import _UNLOADABLE, _reason

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def load_processor(folder: Path, tokenizer: Any) -> Any:
    """transformers' processor of a model folder around `tokenizer`, which gets the processor's chat template where it has none.

    Raises SourceError for a model that takes no images or lacks the files of its processor, UsageError for a package that is
    missing.
    """
    from transformers import AutoConfig, AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        raise SourceError(
            f"{folder} has no processor ({' or '.join(PROCESSOR_FILES)}), which images need: copy the model's own there, or give "
            "text alone"
        )
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder)
            known = PROCESSOR_MAPPING.get(type(config), None)
            if known is None:
                raise SourceError(f"transformers has no processor for {config.model_type}, so images cannot be given to {folder}")
            settings, named = known.get_processor_dict(folder)
            parts = {
                "tokenizer": lambda: tokenizer,
                "image_processor": lambda: AutoImageProcessor.from_pretrained(folder, backend="pil"),
                "video_processor": lambda: None,
            }
            made = [parts[name]() for name in known.get_attributes()]
            processor = _without_videos(known).from_args_and_dict(made, settings, **named)
    except ImportError as error:  # a package, named by transformers
        raise UsageError(
            f"the processor of {folder} needs a package that is not here ({_reason(error, folder)}): pip install "
            "'nvfp4-qad[vision]', and for Mistral 3 the torchvision that belongs to your torch"
        ) from error
    except _UNLOADABLE as error:
        raise SourceError(f"processor of {folder} cannot be loaded ({_reason(error, folder)}): copy its files again") from error
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    return processor


def processor_digest(folder: Path) -> str:
    """Identity of how images become pixel values, by content."""
    return digest_of({name: sha256_file(folder / name) for name in PROCESSOR_FILES if (folder / name).is_file()})


@functools.cache
def _without_videos(known: Any) -> Any:
    def check(self: Any, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else known.check_argument_for_proper_class(self, name, argument)

    return type(known.__name__, (known,), {"check_argument_for_proper_class": check, "__init__": known.__init__})
