"""The numerics: formats, rounding, scales, groups, the quantized Linear."""
