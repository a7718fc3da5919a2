"""Hugging Face folders: equal logits to transformers, exact bytes, and an error that names what is wrong."""

import json
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden.values import TINY_LLAMA, tiny_llama_logits
from models_checkpoint_folders import hf_folder, tiny_config, tiny_tensors

from models.checkpoint import CheckpointError, load_model
from models.checkpoint.huggingface import read_config
from models.config import RopeScaling
from models.llama import DTYPES, dense_logits
