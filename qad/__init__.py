"""Quantization-aware distillation of BF16 language models to NVFP4: numerics, calibration, training, artifacts."""

__version__ = "0.1.0"
