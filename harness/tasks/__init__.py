"""Multiple-choice tasks shipped with the tool: lm-eval YAML files, their questions as JSONL, and the generator."""
