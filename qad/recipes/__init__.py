"""Recipes shipped with the tool: complete YAML files, usable by name (`qad run smollm2-135m`)."""
