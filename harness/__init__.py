"""Measure a checkpoint folder: memory, fidelity to the BF16 teacher, accuracy, throughput; compare the arms."""
