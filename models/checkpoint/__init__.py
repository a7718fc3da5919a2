"""Checkpoints: GGUF, Hugging Face and our own Orbax folders, all read into the one parameter table."""

from models.checkpoint.errors import CheckpointError
from models.checkpoint.fingerprint import weights_fingerprint
from models.checkpoint.load import load_model, load_text
from models.checkpoint.model import Model
from models.checkpoint.orbax import save_checkpoint

__all__ = ["CheckpointError", "Model", "load_model", "load_text", "save_checkpoint", "weights_fingerprint"]
