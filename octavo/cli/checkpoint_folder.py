"""Folders that hold checkpoints and are none: for commands that look at files, config.json or not."""

from pathlib import Path

from octavo.models.checkpoint.dialects import CONFIG_FILE, read_config


def refuse_run(path: Path) -> None:
    """Refuse the folder of a run, of its checkpoints or of one step, as the commands that load a model do.

    Raises:
        CheckpointError: it names the model inside.
    """
    is_step = (path / "model" / CONFIG_FILE).is_file()  # its own .safetensors is the optimizer's
    if path.is_dir() and (is_step or not any(path.glob("*.safetensors"))):
        read_config(path)
